"""Says why there is no key for some settings of other libraries, so that a user who types one gets an answer.

TRL's names are those of GRPOConfig 1.16 and of what it inherits, verl's those of the sections `actor` and `algorithm`.
PPO's critic and learned reward models are no part of this project.
"""

from __future__ import annotations

from collections.abc import Mapping

_OWN_LOSS = "a loss of your own computes it (loss.kind=package.module:function)"
_SEES = "a loss sees the tokens of one microbatch, and this needs those of the whole step"
_LOADER = "there is no data loader, rollout actors read the prompts"
_ENGINES = "engines are started by the run, with weights of their own"
_HUB = "a run uploads nothing; `model/` in the run folder is a Hugging Face folder"
_STEPS = "every step is in metrics.jsonl, and trackers get it, too"
_SCORED = "an evaluation generates answers and scores them with the rewards"
_RESUME = "a resumed run goes on exactly where its checkpoint was written"
_SAMPLING = "sampling has rollout.temperature, top_p, top_k and min_p, with which the trainer's log-probs agree"
_SUPERVISED = "it is of supervised training"
_FIXED_KL = "the weight of the KL divergence is fixed, loss.kl_coef"
_FIXED_ENTROPY = "the weight of the entropy bonus is fixed, loss.entropy_coef"
_MESH = "FSDP2 shards each decoder layer by itself"
_FULL = "checkpoints have everything that a run needs to go on, and are written in the background"

_TRL: tuple[tuple[str, str], ...] = (
    (_OWN_LOSS, "sapo_temperature_neg sapo_temperature_pos vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos "
                "off_policy_mask_threshold"),
    (_SEES, "top_entropy_quantile"),
    (_FIXED_ENTROPY, "entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target use_adaptive_entropy"),
    (_SAMPLING, "generation_kwargs repetition_penalty"),
    ("answers are sampled without a grammar", "vllm_structured_outputs_regex"),
    (_ENGINES, "ds3_gather_for_generation vllm_group_port vllm_server_base_url vllm_server_host vllm_server_port "
               "vllm_server_timeout"),
    ("engines are hf and vllm (rollout.engine), which choose their caches and batches", "cache_implementation "
     "transformers_continuous_batching_config use_transformers_continuous_batching use_transformers_paged use_cache"),
    (_HUB, "log_completions_hub_repo push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
           "hub_revision"),
    ("samples.jsonl has whole groups of texts (logging.samples)", "log_multimodal log_unique_prompts"),
    ("models with code of their own are not loaded", "trust_remote_code"),
    ("dropout is always off", "disable_dropout"),
    ("log-probs are always computed in float32", "cast_lm_head_to_fp32"),
    ("rows are padded or packed as the mesh needs (trainer.packing)", "pad_to_multiple_of"),
    ("rewards and environments get all columns of a prompt", "remove_unused_columns label_names"),
    ("each epoch has an order of its own, from run.seed", "shuffle_dataset"),
    (_LOADER, "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
              "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order"),
    (_STEPS, "logging_strategy logging_steps logging_first_step logging_nan_inf_filter include_num_input_tokens_seen"),
    ("each process has a log file of its own in the run folder", "log_level log_level_replica log_on_each_node"),
    (_SCORED, "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
              "include_for_metrics batch_eval_metrics eval_delay bf16_full_eval fp16_full_eval do_predict"),
    (_RESUME, "ignore_data_skip restore_callback_states_from_checkpoint"),
    (_FULL, "save_only_model save_on_each_node enable_jit_checkpoint"),
    ("all metrics of a validation grow with quality", "greater_is_better"),
    (_SUPERVISED, "label_smoothing_factor neftune_noise_alpha"),
    ("it is left to torch", "tf32 torch_compile_backend torch_compile_mode torch_empty_cache_steps"),
    ("gradients are summed by FSDP2 or Megatron, not by DDP", "ddp_find_unused_parameters ddp_bucket_cap_mb "
     "ddp_broadcast_buffers ddp_static_graph ddp_backend"),
    ("the run finds out where it runs: GPUs are used if there are any", "use_cpu local_rank"),
    ("`headrace train` trains, and validates as validation.every says", "do_train"),
    ("memory and time of each part are always in the metrics", "debug skip_memory_metrics"),
    ("rows are planned by their lengths (trainer.packing)", "length_column_name"),
    ("optimizers with projected gradients are not offered (trainer.optimizer)", "optim_target_modules"),
)  # fmt: skip

_ACTOR, _ALGORITHM = "actor_rollout_ref.actor.", "algorithm."
_VERL: tuple[tuple[str, str, str], ...] = (
    (_ACTOR, _SEES, "policy_loss.clip_cov_ratio policy_loss.clip_cov_lb policy_loss.clip_cov_ub "
                    "policy_loss.kl_cov_ratio policy_loss.ppo_kl_coef"),
    (_ACTOR, "the schedule cosine falls once", "optim.num_cycles"),
    (_ACTOR, _MESH, "fsdp_config.wrap_policy.min_num_params fsdp_config.forward_prefetch fsdp_config.use_orig_params"),
    (_ACTOR, "trained weights are always float32; trainer.mixed_precision computes in bfloat16",
     "fsdp_config.model_dtype"),
    (_ACTOR, "logits and entropy are always computed in pieces", "fsdp_config.entropy_from_logits_with_chunking "
     "fsdp_config.entropy_checkpointing entropy_from_logits_with_chunking entropy_checkpointing"),
    (_ACTOR, "the reference model never trains", "fsdp_config.forward_only"),
    (_ACTOR, "prompts that rows share are computed for each row", "use_prefix_grouper"),
    (_ACTOR, "each epoch of a step divides the groups in a new way", "shuffle"),
    (_ACTOR, _FULL, "checkpoint.save_contents checkpoint.load_contents checkpoint.async_save"),
    (_ACTOR, "routes travel with the rows, not in files", "router_replay.record_file router_replay.replay_file"),
    (_ACTOR, "it serves a baseline that is not offered (advantage.kind)", "calculate_sum_pi_squared "
     "sum_pi_squared_checkpointing"),
    (_ALGORITHM, "rewards are of whole answers, so that nothing is discounted", "gamma"),
    (_ALGORITHM, _FIXED_KL, "kl_ctrl.type kl_ctrl.horizon kl_ctrl.target_kl"),
    (_ALGORITHM, "importance weights are truncated or masked, not normalised", "rollout_correction."
     "rollout_is_batch_normalize"),
    (_ALGORITHM, "prompts are not drawn again by reward; algorithm.dynamic_sampling replaces groups without a signal",
     "use_pf_ppo pf_ppo.reweight_method pf_ppo.weight_pow"),
)  # fmt: skip

WITHOUT_COUNTERPART: Mapping[str, Mapping[str, str]] = {
    "TRL": {name: why for why, names in _TRL for name in names.split()},
    "verl": {f"{start}{name}": why for start, why, names in _VERL for name in names.split()},
}
"""Library -> name of a setting for which there is no key -> why."""
