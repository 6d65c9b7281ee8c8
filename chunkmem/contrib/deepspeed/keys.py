"""The keys of a DeepSpeed configuration, and what each is here, or why it has no counterpart."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from chunkmem.data.deepspeed import COUNTERPARTS

_BITS = "results are bit-identical to plain PyTorch's, and nothing is quantized"
_BUCKETS = "weights and gradients move in chunks, whose size is default_chunk_size"
_PLANNED = "a plan decides what is fetched and dropped, and when, from a recorded step"
_ALWAYS = "that is always so"
_LINEAR = "linear layers are torch's"
_MEASURED = "the disk's speed is measured, and block size and queue depth follow from it"
_PINNED = "HOST memory is pinned whenever there is an accelerator"
HYBRID = "is the dimension shard of a mesh, whose dimension replicate has the other ranks"

DROPPED: Final = MappingProxyType(
    {
        "zero_allow_untested_optimizer": "every optimizer of chunkmem is tested with all it can be combined with",
        "zero_force_ds_cpu_optimizer": "updates on HOST use kernels with torch's bits",
        "prescale_gradients": "gradients are added in rank order, and divided once",
        "gradient_predivide_factor": "gradients are added in rank order, and divided once",
        "sparse_gradients": "gradients of chunks are dense",
        "seq_parallel_communication_data_type": "there is no sequence parallelism",
        "disable_allgather": "weights are gathered by the plan",
        "aio": _MEASURED,
        "steps_per_print": "nothing is printed; manager.metrics() has numbers to log",
        "memory_breakdown": "manager.memory() has it at any time",
        "dump_state": "config.to_dict() has every key",
        "autotuning": "plans are made for this machine's measured speeds",
        "compression_training": _BITS,
        "quantize_training": _BITS,
        "weight_quantization": _BITS,
        "eigenvalue": _BITS,
        "sparse_attention": "attention is the model's",
        "progressive_layer_drop": "leaving out layers is the model's; steps that do follow their plan all the same",
        "curriculum_learning": "batches are your loop's",
        "data_efficiency": "batches are your loop's",
        "dataloader_drop_last": "batches are your loop's",
        "elasticity": "a checkpoint loads over any number of ranks",
        "nebula": "manager.save(asynchronous=True) writes while training continues",
        "hybrid_engine": "generation uses the same weights as training",
        "tensor_parallel": "weights are sharded over ranks, and gathered for their module",
        "graph_harvesting": "steps are replayed by plan",
        "use_data_before_expert_parallelism": "experts are modules as others",
        "timers": "manager.timeline() times every moment",
        "vocabulary_size": "nothing depends on it",
    }
)
"""Top-level keys of theirs that are nothing here, with the reason."""

CHANGED: Final = MappingProxyType(
    {
        "wall_clock_breakdown": "is manager.record(DIR) and chunkmem report DIR",
        "flops_profiler": "is manager.record(DIR) and chunkmem report DIR",
        "comms_logger": "is manager.record(DIR) and chunkmem report DIR",
        "tensorboard": "is manager.metrics() in your loop, for any logger",
        "wandb": "is manager.metrics() in your loop, for any logger",
        "comet": "is manager.metrics() in your loop, for any logger",
        "csv_monitor": "is manager.metrics() in your loop, for any logger",
        "communication_data_type": "is distributed.reduce_dtype for gradients; weights are sent as they are",
        "amp": COUNTERPARTS["amp"],
        "torch_autocast": "is torch.autocast around the model, over fp32 weights",
        "checkpoint": "is manager.save() and manager.load()",
        "data_types": "is now fixed: gradients have the dtype of the weights that are computed with",
        "pipeline": "is manager.pipeline()",
        "compile": "is torch.compile of the model's functions",
        "train_batch_size": COUNTERPARTS["train_batch_size"],
        "train_micro_batch_size_per_gpu": COUNTERPARTS["train_micro_batch_size_per_gpu"],
        "gradient_accumulation_steps": COUNTERPARTS["gradient_accumulation_steps"],
    }
)

ZERO: Final = MappingProxyType(
    {
        "contiguous_gradients": "gradients of a chunk are always contiguous",
        "overlap_comm": "exchanges overlap with computing wherever that is faster",
        "reduce_scatter": _ALWAYS,
        "allgather_partitions": _ALWAYS,
        **dict.fromkeys(
            ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "use_multi_rank_bucket_allreduce"),
            _BUCKETS,
        ),
        **dict.fromkeys(
            (
                *(
                    "stage3_max_live_parameters",
                    "max_live_parameters",
                    "stage3_max_reuse_distance",
                    "max_reuse_distance",
                ),
                *("stage3_prefetch_bucket_size", "prefetch_bucket_size", "stage3_allgather_sequential"),
                *("stage3_param_persistence_threshold", "param_persistence_threshold"),
                *("stage3_model_persistence_threshold", "model_persistence_threshold"),
                *("stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params"),
                *("log_trace_cache_warnings", "round_robin_gradients"),
            ),
            _PLANNED,
        ),
        "stage3_partition_stream_chunk_size": "manager.wrap() packs a model on the meta device, module by module",
        "ignore_unused_parameters": "parameters without a gradient are left alone, as in torch",
        "load_from_fp32_weights": "checkpoints have the fp32 master weights",
        "elastic_checkpoint": "a checkpoint loads over any number of ranks",
        "pipeline_loading_checkpoint": "checkpoints are read a parameter at a time",
        "legacy_stage1": "sharding is that of stage 3",
        **dict.fromkeys(
            (
                *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
                "zeropp_loco_param",
            ),
            _BITS,
        ),
        "memory_efficient_linear": _LINEAR,
        "override_module_apply": "parameters serve themselves, and module.apply works",
        "enable_sanity_checks": "every plan is verified before it is followed",
        "zenflow": "an update uses all gradients of its step",
        "save_muon_momentum_buffer_in_memory": "a plan decides where states are",
        "cpu_offload_use_pin_memory": _PINNED,
        "mics_hierarchical_params_gather": _PLANNED,
    }
)
"""Keys of `zero_optimization` that are nothing here, with the reason."""

OFFLOAD: Final = MappingProxyType(
    {
        "pin_memory": _PINNED,
        **dict.fromkeys(("buffer_count", "buffer_size", "max_in_cpu"), _PLANNED),
        **dict.fromkeys(("pipeline_read", "pipeline_write"), "reading, updating and writing always overlap"),
        "fast_init": "optimizer states are made when they are first needed",
        "ratio": "a plan decides how many states stay on DEVICE, within margin_use_ratio",
        "super_offload": _PLANNED,
        "convert_grad_on_cpu": "gradients stay in the dtype that they have",
        "cpuadam_cores_perc": "update_threads says how many threads update",
    }
)

LOSS_SCALE: Final = MappingProxyType(
    {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
)
"""Keys that both have, with their defaults."""
FP16: Final = MappingProxyType(
    {
        "auto_cast": "inputs of the model are cast where a module computes",
        "consecutive_hysteresis": "overflows are counted since the scale last changed",
        "fp16_master_weights_and_grads": "updates in fp16 vanish or overflow; master weights are fp32",
    }
)
BF16: Final = MappingProxyType(
    {
        "immediate_grad_update": _PLANNED,
        "check_grad_overflow": "gradients in bf16 have the range of fp32",
    }
)
CHECKPOINTING: Final = (
    *("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "number_checkpoints"),
    *("synchronize_checkpoint_boundary", "profile"),
)
ADAM_DEFAULTS: Final = MappingProxyType({"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0})
_WARM_UP = "whose warm-up is linear, where DeepSpeed's default is logarithmic"
SCHEDULERS: Final = MappingProxyType(
    {
        "WarmupLR": f"; of Trainer --lr_scheduler_type constant_with_warmup, {_WARM_UP}",
        "WarmupDecayLR": f"; of Trainer --lr_scheduler_type linear, {_WARM_UP}",
        "WarmupCosineLR": f"; of Trainer --lr_scheduler_type cosine, {_WARM_UP}",
    }
)
"""Their classes, and what trains alike."""
WITH_MASTERS: Final = 'DeepSpeed\'s bf16 weights with fp32 master weights are "precision": "bf16" without that argument'
