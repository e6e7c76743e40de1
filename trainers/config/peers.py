"""Maps the settings of TRL, verl, prime-rl and NeMo-RL to the config keys of this project.

The names are those of TRL's GRPOConfig, verl's ppo_trainer.yaml, prime-rl's rl.toml and NeMo-RL's grpo_math_1B.yaml, as
published in 2025 and 2026. If a user types one of these names, the error message suggests our key.
docs/start/coming-from.md shows the tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .absent_peers import WITHOUT_COUNTERPART

Row = tuple[str, str, str]
"""A setting of another library, our keys (separated by spaces), and a note on differences ("" if there are none)."""

_MICRO = "counted in tokens"
_EPOCHS = "counted in steps: prompts of the data set x epochs / prompts per step"
_BOTH = "one bound for each side"

PEERS: Mapping[str, tuple[Row, ...]] = {
    "TRL": (
        ("model_name_or_path", "model.path", ""),
        ("output_dir", "run.dir", ""),
        ("seed", "run.seed", ""),
        ("learning_rate", "trainer.lr", ""),
        ("lr_scheduler_type", "trainer.schedule", "by the same names"),
        ("lr_scheduler_kwargs", "trainer.min_lr trainer.power trainer.decay_ratio", ""),
        ("warmup_steps", "trainer.warmup_steps", "below 1: trainer.warmup_ratio"),
        ("warmup_ratio", "trainer.warmup_ratio", ""),
        ("optim", "trainer.optimizer", "adamw, adamw_8bit, adamw_bf16 or muon"),
        ("optim_args", "trainer.betas trainer.eps", ""),
        ("adam_beta1", "trainer.betas", "the first"),
        ("adam_beta2", "trainer.betas", "the second"),
        ("adam_epsilon", "trainer.eps", ""),
        ("weight_decay", "trainer.weight_decay", ""),
        ("max_grad_norm", "trainer.grad_clip", ""),
        ("bf16", "trainer.mixed_precision model.dtype", ""),
        ("gradient_checkpointing", "trainer.recompute", ""),
        ("per_device_train_batch_size", "trainer.tokens_per_microbatch", _MICRO),
        ("gradient_accumulation_steps", "algorithm.prompts_per_step", "microbatches follow from the size of the step"),
        ("generation_batch_size", "algorithm.prompts_per_step", "in prompts, not in samples"),
        ("steps_per_generation", "algorithm.minibatches", ""),
        ("num_iterations", "algorithm.epochs", ""),
        ("num_train_epochs", "algorithm.steps", _EPOCHS),
        ("max_steps", "algorithm.steps", ""),
        ("num_generations", "algorithm.group_size", ""),
        ("max_prompt_length", "data.max_prompt_tokens", ""),
        ("max_length", "sft.max_tokens", "of `headrace sft`"),
        ("assistant_only_loss", "sft.turns", "always; which of the assistant's turns"),
        ("max_completion_length", "rollout.max_new_tokens", ""),
        ("temperature", "rollout.temperature", ""),
        ("top_p", "rollout.top_p", ""),
        ("top_k", "rollout.top_k", ""),
        ("min_p", "rollout.min_p", ""),
        ("use_vllm", "rollout.engine", "vllm"),
        ("vllm_mode", "resources.layout", "colocated or separate"),
        ("vllm_tensor_parallel_size", "rollout.tp", ""),
        ("vllm_gpu_memory_utilization", "rollout.gpu_memory_utilization", ""),
        ("vllm_enable_sleep_mode", "resources.switch_roles", ""),
        ("vllm_importance_sampling_correction", "loss.correction", "tis"),
        ("vllm_importance_sampling_cap", "loss.correction_high", ""),
        ("beta", "loss.kl_coef", "with loss.kl_kind=k3_is, which is TRL's default"),
        ("epsilon", "loss.clip_low loss.clip_high", _BOTH),
        ("epsilon_high", "loss.clip_high", ""),
        ("delta", "loss.clip_dual", ""),
        ("importance_sampling_level", "loss.kind", "`sequence` is gspo"),
        ("loss_type", "loss.kind loss.aggregation", "grpo: sequence; dapo: token; dr_grpo: sequence_sum"),
        ("scale_rewards", "advantage.kind", "false: dr_grpo"),
        ("sync_ref_model", "loss.reference_every", "above 0"),
        ("ref_model_sync_steps", "loss.reference_every", "in steps, not in updates"),
        ("ref_model_mixup_alpha", "loss.reference_mix", ""),
        ("mask_truncated_completions", "algorithm.mask_truncated", ""),
        ("reward_funcs", "reward.functions", "package.module:function"),
        ("reward_weights", "reward.functions", "`weight` of each function"),
        ("chat_template_kwargs", "data.chat_template_kwargs", ""),
        ("eval_steps", "validation.every", ""),
        ("save_steps", "run.checkpoint_every", ""),
        ("save_total_limit", "run.keep_checkpoints", ""),
        ("resume_from_checkpoint", "run.dir", "`headrace train CONFIG --resume`"),
        ("log_completions", "logging.samples.every", ""),
        ("num_completions_to_print", "logging.samples.groups", "`headrace samples RUN_DIR`"),
        ("vllm_importance_sampling_mode", "loss.correction", "token_truncate: tis; token_mask: icepop"),
        ("vllm_importance_sampling_clip_max", "loss.correction_high", ""),
        ("vllm_importance_sampling_clip_min", "loss.correction_low", ""),
        ("vllm_max_model_length", "rollout.max_model_len", ""),
        ("vllm_model_impl", "rollout.vllm", "{model_impl: ...}"),
        ("max_tool_calling_iterations", "environment.options", "max_turns, with environment.kind=tool_use"),
        ("multi_objective_aggregation", "advantage.kind", "normalize_then_sum: gdpo"),
        ("num_generations_eval", "validation.n", ""),
        ("torch_compile", "trainer.compile", ""),
        ("gradient_checkpointing_kwargs", "trainer.recompute", ""),
        ("use_liger_kernel", "trainer.head", "selected"),
        ("liger_kernel_config", "trainer.head", "selected"),
        ("fp16", "trainer.mixed_precision", "in bfloat16"),
        ("fsdp", "trainer.backend trainer.dp trainer.reshard_after_forward", ""),
        ("fsdp_config", "trainer.backend trainer.dp trainer.reshard_after_forward", ""),
        ("deepspeed", "trainer.backend trainer.dp trainer.offload_optimizer", "FSDP2 or Megatron"),
        ("parallelism_config", "trainer.dp trainer.tp trainer.cp", ""),
        ("accelerator_config", "trainer.dp trainer.tp trainer.mixed_precision", ""),
        ("ddp_timeout", "resources.collective_timeout_s", ""),
        ("auto_find_batch_size", "trainer.tokens_per_microbatch", _MICRO),
        ("average_tokens_across_devices", "loss.aggregation", "always over all ranks"),
        ("train_sampling_strategy", "trainer.packing", ""),
        ("per_device_eval_batch_size", "rollout.max_batch", ""),
        ("do_eval", "validation.every", ""),
        ("eval_strategy", "validation.every", ""),
        ("eval_on_start", "validation.every", "the first validation is before step 1"),
        ("save_strategy", "run.checkpoint_every run.checkpoint_minutes", ""),
        ("load_best_model_at_end", "run.keep_best", ""),
        ("metric_for_best_model", "validation.metric", ""),
        ("full_determinism", "run.deterministic", ""),
        ("data_seed", "run.seed", ""),
        ("disable_tqdm", "logging.progress", ""),
        ("report_to", "logging.trackers", ""),
        ("run_name", "run.name", ""),
        ("project", "logging.trackers", "options"),
        ("trackio_space_id", "logging.trackers", "options"),
        ("trackio_bucket_id", "logging.trackers", "options"),
        ("trackio_static_space_id", "logging.trackers", "options"),
        ("router_aux_loss_coef", "trainer.moe.aux_loss_coef", ""),
        ("entropy_coef", "loss.entropy_coef", ""),
        ("use_bias_correction_kl", "loss.kl_kind", "true: k3_is"),
        ("model_init_kwargs", "model.dtype", "dtype and attention (model.attention)"),
    ),
    "verl": (
        ("actor_rollout_ref.actor.optim.optimizer", "trainer.optimizer", ""),
        ("actor_rollout_ref.actor.optim.optimizer_impl", "trainer.optimizer", ""),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", "trainer.warmup_ratio", ""),
        ("actor_rollout_ref.actor.optim.total_training_steps", "algorithm.steps", ""),
        ("actor_rollout_ref.actor.optim.betas", "trainer.betas", ""),
        ("actor_rollout_ref.actor.optim.clip_grad", "trainer.grad_clip", ""),
        ("actor_rollout_ref.actor.optim.min_lr_ratio", "trainer.min_lr", "a rate, not a share"),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type", "trainer.schedule", ""),
        ("actor_rollout_ref.actor.optim.warmup_style", "trainer.schedule", ""),
        ("actor_rollout_ref.actor.optim.override_optimizer_config", "trainer.betas trainer.eps", ""),
        ("actor_rollout_ref.actor.fsdp_config.optimizer_offload", "trainer.offload_optimizer", ""),
        ("actor_rollout_ref.actor.fsdp_config.offload_policy", "trainer.offload", ""),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size", "trainer.dp", ""),
        ("actor_rollout_ref.actor.fsdp_config.seed", "run.seed", ""),
        ("actor_rollout_ref.actor.fsdp_config.full_determinism", "run.deterministic", ""),
        ("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size", "trainer.cp", ""),
        ("actor_rollout_ref.actor.fsdp_config.use_torch_compile", "trainer.compile", ""),
        ("actor_rollout_ref.actor.fsdp_config.strategy", "trainer.backend", ""),
        ("actor_rollout_ref.actor.fsdp_config.dtype", "trainer.mixed_precision", ""),
        ("actor_rollout_ref.actor.rollout_n", "algorithm.group_size", ""),
        ("actor_rollout_ref.actor.ppo_micro_batch_size", "trainer.tokens_per_microbatch", _MICRO),
        ("actor_rollout_ref.actor.tau_pos", "loss.kind loss.options", "a loss of your own"),
        ("actor_rollout_ref.actor.tau_neg", "loss.kind loss.options", "a loss of your own"),
        ("actor_rollout_ref.actor.freeze_vision_tower", "trainer.freeze", "`[vision]`, or patterns of names"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "loss.kind", ""),
        ("actor_rollout_ref.actor.loss_scale_factor", "loss.length_norm", ""),
        ("actor_rollout_ref.actor.calculate_entropy", "trainer.entropy_metric", ""),
        ("actor_rollout_ref.actor.use_torch_compile", "trainer.compile", ""),
        ("actor_rollout_ref.actor.data_loader_seed", "run.seed", ""),
        ("actor_rollout_ref.actor.use_fused_kernels", "trainer.head", "selected"),
        ("actor_rollout_ref.actor.router_replay.mode", "router_replay.enabled", ""),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", "trainer.cp", ""),
        ("actor_rollout_ref.actor.use_remove_padding", "trainer.packing", "packed"),
        ("algorithm.rollout_correction.rollout_is", "loss.correction", "token: tis; sequence: sequence"),
        ("algorithm.rollout_correction.rollout_is_threshold", "loss.correction_high", ""),
        ("algorithm.rollout_correction.rollout_rs", "loss.correction", "icepop or sequence_mask"),
        ("algorithm.rollout_correction.rollout_rs_threshold", "loss.correction_low loss.correction_high", ""),
        ("algorithm.rollout_correction.bypass_mode", "algorithm.prev_logprobs", "rollout"),
        ("algorithm.rollout_correction.loss_type", "loss.kind", ""),
        ("algorithm.kl_penalty", "loss.kl_kind", "with loss.kl_in=reward"),
        ("actor_rollout_ref.model.path", "model.path", ""),
        ("data.train_files", "data.train", ".jsonl or a Hugging Face dataset"),
        ("data.val_files", "data.validation", ""),
        ("data.prompt_key", "data.prompt_field", ""),
        ("data.train_batch_size", "algorithm.prompts_per_step", ""),
        ("data.max_prompt_length", "data.max_prompt_tokens", ""),
        ("data.max_response_length", "rollout.max_new_tokens", ""),
        ("data.sampler.class_path", "data.curriculum", "by data.success_field"),
        ("data.filter_overlong_prompts", "data.overlong_prompts", "drop"),
        ("actor_rollout_ref.rollout.n", "algorithm.group_size", ""),
        ("actor_rollout_ref.rollout.name", "rollout.engine", ""),
        ("actor_rollout_ref.rollout.temperature", "rollout.temperature", ""),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "rollout.tp", ""),
        ("actor_rollout_ref.rollout.gpu_memory_utilization", "rollout.gpu_memory_utilization", ""),
        ("actor_rollout_ref.rollout.val_kwargs.n", "validation.n", ""),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "validation.temperature", ""),
        ("actor_rollout_ref.actor.strategy", "trainer.backend", ""),
        ("actor_rollout_ref.actor.optim.lr", "trainer.lr", ""),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps", "trainer.warmup_steps", ""),
        ("actor_rollout_ref.actor.optim.weight_decay", "trainer.weight_decay", ""),
        ("actor_rollout_ref.actor.grad_clip", "trainer.grad_clip", ""),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "algorithm.minibatches", "number of mini-batches"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "trainer.tokens_per_microbatch", _MICRO),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "trainer.tokens_per_microbatch", ""),
        ("actor_rollout_ref.actor.use_dynamic_bsz", "trainer.packing", "dynamic"),
        ("actor_rollout_ref.actor.ppo_epochs", "algorithm.epochs", ""),
        ("actor_rollout_ref.actor.clip_ratio", "loss.clip_low loss.clip_high", _BOTH),
        ("actor_rollout_ref.actor.clip_ratio_low", "loss.clip_low", ""),
        ("actor_rollout_ref.actor.clip_ratio_high", "loss.clip_high", ""),
        ("actor_rollout_ref.actor.clip_ratio_c", "loss.clip_dual", ""),
        ("actor_rollout_ref.actor.loss_agg_mode", "loss.aggregation", ""),
        ("actor_rollout_ref.actor.use_kl_loss", "loss.kl_coef", "above 0"),
        ("actor_rollout_ref.actor.kl_loss_coef", "loss.kl_coef", ""),
        ("actor_rollout_ref.actor.kl_loss_type", "loss.kl_kind", "low_var_kl is k3; verl also bounds it at 10"),
        ("actor_rollout_ref.actor.entropy_coeff", "loss.entropy_coef", ""),
        ("actor_rollout_ref.actor.fsdp_config.param_offload", "trainer.offload", ""),
        ("actor_rollout_ref.actor.fsdp_config.reshard_after_forward", "trainer.reshard_after_forward", ""),
        ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size", "trainer.pp", ""),
        ("actor_rollout_ref.actor.megatron.context_parallel_size", "trainer.cp", ""),
        ("actor_rollout_ref.actor.megatron.expert_model_parallel_size", "trainer.ep", ""),
        ("actor_rollout_ref.model.enable_gradient_checkpointing", "trainer.recompute", ""),
        ("algorithm.adv_estimator", "advantage.kind", ""),
        ("algorithm.norm_adv_by_std_in_grpo", "advantage.kind", "false: dr_grpo"),
        ("algorithm.use_kl_in_reward", "loss.kl_in", "reward"),
        ("algorithm.kl_ctrl.kl_coef", "loss.kl_coef", "with loss.kl_in=reward"),
        ("algorithm.filter_groups.enable", "algorithm.dynamic_sampling.enabled", ""),
        ("algorithm.filter_groups.max_num_gen_batches", "algorithm.dynamic_sampling.max_factor", ""),
        ("custom_reward_function.path", "reward.functions", "package.module:function"),
        ("reward_model.overlong_buffer.enable", "reward.functions", "kind: overlong"),
        ("trainer.total_epochs", "algorithm.steps", _EPOCHS),
        ("trainer.total_training_steps", "algorithm.steps", ""),
        ("trainer.save_freq", "run.checkpoint_every", ""),
        ("trainer.test_freq", "validation.every", ""),
        ("trainer.default_local_dir", "run.dir", ""),
        ("trainer.experiment_name", "run.name", ""),
        ("trainer.rollout_data_dir", "logging.samples.every", "samples.jsonl in the run folder"),
        ("trainer.log_val_generations", "logging.samples.groups", ""),
        ("trainer.resume_mode", "run.dir", "`headrace train CONFIG --resume`"),
        ("trainer.n_gpus_per_node", "trainer.dp rollout.num_engines", "resources.layout places them"),
        ("async_training.staleness_threshold", "algorithm.max_staleness", "in versions"),
    ),
    "prime-rl": (
        ("model.name", "model.path", ""),
        ("max_steps", "algorithm.steps", ""),
        ("seq_len", "data.max_prompt_tokens rollout.max_new_tokens", "the two together"),
        ("output_dir", "run.dir", ""),
        ("max_async_level", "algorithm.max_staleness", "with algorithm.mode=async"),
        ("orchestrator.batch_size", "algorithm.prompts_per_step", "in prompts: samples / group size"),
        ("orchestrator.group_size", "algorithm.group_size", ""),
        ("orchestrator.rollouts_per_example", "algorithm.group_size", ""),
        ("orchestrator.max_off_policy_steps", "algorithm.max_staleness", ""),
        ("orchestrator.oversampling_factor", "algorithm.dynamic_sampling.oversample", ""),
        ("orchestrator.train.sampling.max_completion_tokens", "rollout.max_new_tokens", ""),
        ("orchestrator.sampling.max_tokens", "rollout.max_new_tokens", ""),
        ("orchestrator.sampling.temperature", "rollout.temperature", ""),
        ("orchestrator.eval.interval", "validation.every", ""),
        ("orchestrator.eval.rollouts_per_example", "validation.n", ""),
        ("trainer.optim.lr", "trainer.lr", ""),
        ("trainer.optim.max_norm", "trainer.grad_clip", ""),
        ("trainer.optim.weight_decay", "trainer.weight_decay", ""),
        ("trainer.scheduler.warmup_steps", "trainer.warmup_steps", ""),
        ("trainer.model.ac", "trainer.recompute", ""),
        ("trainer.model.cp", "trainer.cp", "with trainer.backend=megatron"),
        ("trainer.model.ep", "trainer.ep", "with trainer.backend=megatron"),
        ("trainer.loss.ratio_type", "loss.kind", "`sequence` is gspo"),
        ("trainer.loss.kl_tau", "loss.kl_coef", ""),
        ("inference.vllm.tensor_parallel_size", "rollout.tp", ""),
        ("inference.parallel.tp", "rollout.tp", ""),
        ("inference.parallel.dp", "rollout.num_engines", ""),
        ("deployment.num_train_gpus", "trainer.dp", ""),
        ("deployment.num_infer_gpus", "rollout.num_engines", ""),
        ("weight_broadcast.type", "sync.transport", "nccl: collective; filesystem: disk"),
        ("ckpt.interval", "run.checkpoint_every", ""),
        ("ckpt.keep_last", "run.keep_checkpoints", ""),
    ),
    "NeMo-RL": (
        ("policy.model_name", "model.path", ""),
        ("grpo.num_prompts_per_step", "algorithm.prompts_per_step", ""),
        ("grpo.num_generations_per_prompt", "algorithm.group_size", ""),
        ("grpo.max_num_steps", "algorithm.steps", ""),
        ("grpo.max_num_epochs", "algorithm.steps", _EPOCHS),
        ("grpo.max_rollout_turns", "environment.options", "max_turns, with environment.kind=tool_use"),
        ("grpo.normalize_rewards", "advantage.kind", "false: dr_grpo"),
        ("grpo.use_leave_one_out_baseline", "advantage.kind", "rloo"),
        ("grpo.overlong_filtering", "algorithm.mask_truncated", ""),
        ("grpo.use_dynamic_sampling", "algorithm.dynamic_sampling.enabled", ""),
        ("grpo.val_period", "validation.every", ""),
        ("grpo.max_val_samples", "validation.num_prompts", ""),
        ("grpo.seed", "run.seed", ""),
        ("grpo.async_grpo.enabled", "algorithm.mode", "async"),
        ("grpo.async_grpo.max_trajectory_age_steps", "algorithm.max_staleness", ""),
        ("loss_fn.reference_policy_kl_penalty", "loss.kl_coef", ""),
        ("loss_fn.ratio_clip_min", "loss.clip_low", ""),
        ("loss_fn.ratio_clip_max", "loss.clip_high", ""),
        ("loss_fn.ratio_clip_c", "loss.clip_dual", ""),
        ("loss_fn.use_importance_sampling_correction", "loss.correction", "tis"),
        ("loss_fn.sequence_level_importance_ratios", "loss.kind", "gspo"),
        ("loss_fn.token_level_loss", "loss.aggregation", "token, else sequence"),
        ("policy.train_global_batch_size", "algorithm.minibatches", "number of mini-batches"),
        ("policy.train_micro_batch_size", "trainer.tokens_per_microbatch", _MICRO),
        ("policy.logprob_batch_size", "trainer.tokens_per_microbatch", _MICRO),
        ("policy.max_total_sequence_length", "data.max_prompt_tokens rollout.max_new_tokens", "the two together"),
        ("policy.precision", "trainer.mixed_precision model.dtype", ""),
        ("policy.max_grad_norm", "trainer.grad_clip", ""),
        ("policy.optimizer.kwargs.lr", "trainer.lr", ""),
        ("policy.optimizer.kwargs.weight_decay", "trainer.weight_decay", ""),
        ("policy.optimizer.kwargs.betas", "trainer.betas", ""),
        ("policy.sequence_packing.enabled", "trainer.packing", "packed"),
        ("policy.dynamic_batching.enabled", "trainer.packing", "dynamic"),
        ("policy.dtensor_cfg.tensor_parallel_size", "trainer.tp", ""),
        ("policy.dtensor_cfg.cpu_offload", "trainer.offload", ""),
        ("policy.dtensor_cfg.activation_checkpointing", "trainer.recompute", ""),
        ("policy.megatron_cfg.enabled", "trainer.backend", "megatron"),
        ("policy.megatron_cfg.tensor_model_parallel_size", "trainer.tp", ""),
        ("policy.megatron_cfg.pipeline_model_parallel_size", "trainer.pp", ""),
        ("policy.megatron_cfg.context_parallel_size", "trainer.cp", ""),
        ("policy.megatron_cfg.expert_model_parallel_size", "trainer.ep", ""),
        ("policy.generation.backend", "rollout.engine", ""),
        ("policy.generation.max_new_tokens", "rollout.max_new_tokens", ""),
        ("policy.generation.temperature", "rollout.temperature", ""),
        ("policy.generation.top_p", "rollout.top_p", ""),
        ("policy.generation.stop_strings", "rollout.stop", ""),
        ("policy.generation.stop_token_ids", "rollout.stop_token_ids", "added to the ends that the model's files name"),
        ("policy.generation.vllm_cfg.tensor_parallel_size", "rollout.tp", ""),
        ("policy.generation.vllm_cfg.gpu_memory_utilization", "rollout.gpu_memory_utilization", ""),
        ("policy.generation.colocated.enabled", "resources.layout", "colocated or separate"),
        ("data.max_input_seq_length", "data.max_prompt_tokens", ""),
        ("data.dataset_name", "data.train", ""),
        ("data.input_key", "data.prompt_field", ""),
        ("data.output_key", "data.answer_field", ""),
        ("checkpointing.checkpoint_dir", "run.dir", ""),
        ("checkpointing.save_period", "run.checkpoint_every", ""),
        ("checkpointing.keep_top_k", "run.keep_checkpoints", "the latest; run.keep_best keeps the best"),
        ("checkpointing.metric_name", "validation.metric", ""),
        ("logger.tensorboard_enabled", "logging.tensorboard", ""),
        ("logger.num_val_samples_to_print", "logging.samples.groups", "`headrace samples RUN_DIR`"),
        ("cluster.gpus_per_node", "trainer.dp rollout.num_engines", "resources.layout places them"),
    ),
}  # fmt: skip
"""Name of a library -> its settings."""

_LORA = "adapters are the section trainer.lora, from trainer.lora.rank on"
_CRITIC = "there is no critic, advantages come from the rewards of a group (advantage.kind)"
REMARKS: Mapping[str, str] = {
    **dict.fromkeys(("lora", "peft", "peft_config", "use_peft"), _LORA),
    **dict.fromkeys(("critic", "gae", "lam"), _CRITIC),
    "reward_model": "there is no reward model, a function of reward.functions can call one",
    "profiler": "the timeline of run.trace_step and the metrics say where time and memory go",
}
"""A part of the name of a setting -> why there is no key for it."""

ALIASES: Mapping[str, tuple[str, ...]] = {
    "batch_size": ("algorithm.prompts_per_step",),
    "cliprange": ("loss.clip_low", "loss.clip_high"),
    "lora_alpha": ("trainer.lora.alpha",),
    "lora_dropout": ("trainer.lora.dropout",),
    "lora_r": ("trainer.lora.rank",),
    "lora_rank": ("trainer.lora.rank",),
    "lora_target_modules": ("trainer.lora.targets",),
    "max_tokens": ("rollout.max_new_tokens",),
    "micro_batch_size": ("trainer.tokens_per_microbatch",),
    "min_lr_rate": ("trainer.min_lr",),
    "min_lr_ratio": ("trainer.min_lr",),
    "n": ("algorithm.group_size",),
    "ppo_micro_batch_size": ("trainer.tokens_per_microbatch",),
    "tensor_model_parallel_size": ("rollout.tp", "trainer.tp"),
    "tensor_parallel_size": ("rollout.tp", "trainer.tp"),
}
"""Last part of a setting's name -> our keys, for names that several libraries share or that no table contains."""

NO_COUNTERPART = "it has no counterpart here"
"""Hint for a setting of another library without a key here."""
MOST_MEANT = 3
"""Largest number of keys that are suggested for one name."""


@dataclass(frozen=True, slots=True)
class Meant:
    """Our keys for a name of another library."""

    keys: tuple[str, ...]
    parts: int
    """Number of parts at the end of the dotted name that were recognised; 0 for an unknown name."""
    remark: str = ""
    """What the user should know, for example that there is no such key; "" for nothing."""

    @property
    def hint(self) -> str:
        """The end of a sentence about an unknown key; "" if nothing is known about the name."""
        if not self.keys:
            return self.remark
        return f"did you mean {' or '.join(self.keys)}?" + (f" ({self.remark})" if self.remark else "")


def meant_keys(path: Sequence[str], own_names: Collection[str] = ()) -> Meant:
    """Return our keys for the setting of another library with the dotted name whose parts are `path`. The settings that
    agree with the most parts at the end of `path` decide. own_names: last parts of our own keys. If only the last of
    several parts agrees and it is in `own_names`, the match is too weak, and no keys are returned.
    """
    last = path[-1]
    is_row = any(row[0].split(".") == [*path] for rows in PEERS.values() for row in rows)
    absent = "" if is_row else next((REMARKS[part] for part in path if part in REMARKS), "")
    if absent:
        return Meant((), len(path), absent)
    why = next((found for found in _reasons(path)), "")
    if why and not is_row:
        return Meant((), len(path), why)
    best, found = 0, list[str]()
    for theirs, ours, _ in (row for rows in PEERS.values() for row in rows):
        names = theirs.split(".")
        count = 0
        while count < min(len(names), len(path)) and names[-1 - count] == path[-1 - count]:
            count += 1
        if count > best:
            best, found = count, []
        if count and count == best:
            found += ours.split()
    if best <= 1 and last in ALIASES:
        return Meant(ALIASES[last], 1)
    whole = len(path) == 1 and any(row[0] == last for rows in PEERS.values() for row in rows)
    if best == 1 and last in own_names and not whole:
        return Meant((), 0)
    return Meant(tuple(dict.fromkeys(found))[:MOST_MEANT], best)


def _reasons(path: Sequence[str]) -> Iterator[str]:
    """Yield why there is no key for the setting whose dotted name, or its last part in TRL, `path` is."""
    for names in WITHOUT_COUNTERPART.values():
        for name in {".".join(path), path[-1]} & names.keys():
            yield names[name]


def leaves(section: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every value in nested dicts."""
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key))
