"""Lists the keys of verl's sections `actor_rollout_ref.actor` and `algorithm`.

They are those of `_generated_ppo_trainer.yaml` in verl-project/verl at commit
1a7e2cabcbb38696dc9c1e692a27e9986f9b2334, without the names of classes.
"""

ACTOR = """
    optim.optimizer optim.optimizer_impl optim.lr optim.lr_warmup_steps_ratio optim.total_training_steps
    optim.weight_decay optim.lr_warmup_steps optim.betas optim.clip_grad optim.min_lr_ratio optim.num_cycles
    optim.lr_scheduler_type optim.warmup_style optim.override_optimizer_config
    fsdp_config.wrap_policy.min_num_params fsdp_config.param_offload fsdp_config.optimizer_offload
    fsdp_config.offload_policy fsdp_config.reshard_after_forward fsdp_config.fsdp_size fsdp_config.forward_prefetch
    fsdp_config.model_dtype fsdp_config.use_orig_params fsdp_config.seed fsdp_config.full_determinism
    fsdp_config.ulysses_sequence_parallel_size fsdp_config.entropy_from_logits_with_chunking
    fsdp_config.use_torch_compile fsdp_config.entropy_checkpointing fsdp_config.forward_only fsdp_config.strategy
    fsdp_config.dtype rollout_n strategy ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu
    use_dynamic_bsz ppo_max_token_len_per_gpu clip_ratio clip_ratio_low clip_ratio_high tau_pos tau_neg
    freeze_vision_tower policy_loss.loss_mode policy_loss.clip_cov_ratio policy_loss.clip_cov_lb
    policy_loss.clip_cov_ub policy_loss.kl_cov_ratio policy_loss.ppo_kl_coef clip_ratio_c loss_agg_mode
    loss_scale_factor entropy_coeff calculate_entropy use_kl_loss use_prefix_grouper use_torch_compile kl_loss_coef
    kl_loss_type ppo_epochs shuffle data_loader_seed checkpoint.save_contents checkpoint.load_contents
    checkpoint.async_save use_fused_kernels profiler.tool profiler.enable profiler.all_ranks profiler.ranks
    profiler.save_path profiler.tool_config.nsys.discrete profiler.tool_config.npu.contents
    profiler.tool_config.npu.level profiler.tool_config.npu.analysis profiler.tool_config.npu.discrete
    profiler.tool_config.torch.contents profiler.tool_config.torch.discrete
    profiler.tool_config.torch_memory.trace_alloc_max_entries profiler.tool_config.torch_memory.stack_depth
    router_replay.mode router_replay.record_file router_replay.replay_file grad_clip ulysses_sequence_parallel_size
    entropy_from_logits_with_chunking entropy_checkpointing use_remove_padding calculate_sum_pi_squared
    sum_pi_squared_checkpointing
"""
ALGORITHM = """
    rollout_correction.rollout_is rollout_correction.rollout_is_threshold rollout_correction.rollout_rs
    rollout_correction.rollout_rs_threshold rollout_correction.bypass_mode rollout_correction.loss_type
    rollout_correction.rollout_is_batch_normalize gamma lam adv_estimator norm_adv_by_std_in_grpo use_kl_in_reward
    kl_penalty kl_ctrl.type kl_ctrl.kl_coef kl_ctrl.horizon kl_ctrl.target_kl use_pf_ppo pf_ppo.reweight_method
    pf_ppo.weight_pow
"""
KEYS = [
    *(f"actor_rollout_ref.actor.{name}" for name in ACTOR.split()),
    *(f"algorithm.{name}" for name in ALGORITHM.split()),
]
