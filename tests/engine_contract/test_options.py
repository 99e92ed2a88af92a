"""Fault catalogue B7: every option of vLLM is in the namespace, or a reason here says why it is not.

A release of vLLM that adds an option fails the first test until somebody has looked at it.
"""

from __future__ import annotations

import dataclasses

import pytest
from vllm.config import VllmConfig
from vllm.config.attention import AttentionConfig
from vllm.config.lora import LoRAConfig
from vllm.engine.arg_utils import EngineArgs

from kvstow.vllm.identity import Identity, adapter_options, model_identity
from tests.engine_contract.stack import Shape, vllm_config

pytestmark = pytest.mark.contract

#: Options by the field of the namespace that they are in.
IN_NAMESPACE: dict[str, str] = {
    "weights": "model model_weights revision download_dir",
    "model config": "hf_config_path config_format hf_overrides",
    "model implementation": "model_impl",
    "model class overrides": "model_class_overrides",
    "remote code": "trust_remote_code code_revision",
    "model dtype": "dtype",
    "quantization": "quantization quantization_config",
    "rope mode": "max_model_len",
    "sliding window": "disable_sliding_window",
    "load format": "load_format",
    "loader options": "model_loader_extra_config ignore_patterns",
    "multimodal processor": "mm_processor_kwargs",
    "multimodal encoder": (
        "mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method"
    ),
    "kv dtype": "kv_cache_dtype",
    "kv dtype of skipped layers": "kv_cache_dtype_skip_layers",
    "attention backends": "attention_backend",
    "attention options": "attention_config",
    "kernels": "moe_backend linear_backend kernel_config",
    "additional config": "additional_config",
    "worker classes": "worker_cls worker_extension_cls",
    "parallel": (
        "tensor_parallel_size pipeline_parallel_size decode_context_parallel_size "
        "prefill_context_parallel_size cp_kv_cache_interleave_size dcp_kv_cache_interleave_size"
    ),
    "block hash": "prefix_caching_hash_algo",
    "pages 0/0": "block_size",
    "draft weights": "speculative_config spec_method spec_model spec_tokens",
}

#: Options that are part of each adapter's namespace.
IN_ADAPTERS = (
    "lora_dtype lora_target_modules enable_tower_connector_lora enable_mixed_moe_lora_format "
    "enable_moe_shared_loras"
)

#: Options by the reason why two engines that differ in them may share KV.
NOT_IN_NAMESPACE: dict[str, str] = {
    "it changes which tokens or embeddings a prompt has, and these are in the keys": (
        "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init enable_prompt_embeds "
        "interleave_mm_strings io_processor_plugin language_model_only limit_mm_per_prompt "
        "enable_mm_embeds media_io_kwargs mm_processor_device mm_device_do_normalize "
        "mm_hasher_algorithm tokens_only"
    ),
    "it says where things are or who may fetch them": (
        "allowed_local_media_path allowed_media_domains hf_token served_model_name"
    ),
    "it is about what comes after the last layer: pooling, sampling, parsing": (
        "runner convert pooler_config max_logprobs logprobs_mode use_fp64_gumbel "
        "return_sampling_mask generation_config override_generation_config logits_processors "
        "structured_outputs_config reasoning_parser reasoning_parser_plugin reasoning_config "
        "watermark_config enable_trace_replay enable_batch_sharded_sampling aux_output_config "
        "max_lora_cls_labels stream_interval"
    ),
    "it is about how files are read, not which": (
        "safetensors_load_strategy safetensors_prefetch_num_threads "
        "safetensors_prefetch_block_size max_parallel_loading_workers use_tqdm_on_load "
        "pt_load_map_location allow_deprecated_quantization mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin enable_ep_weight_filter"
    ),
    "random weights have no lasting identity, and nothing else uses it": "seed",
    "the same sums in another order: within what two batches differ in as well": (
        "enforce_eager cudagraph_capture_sizes max_cudagraph_capture_size compilation_config "
        "optimization_level performance_mode ir_op_priority enable_flashinfer_autotune monokernel "
        "disable_cascade_attn disable_custom_all_reduce all2all_backend enable_hc_sp "
        "enable_expert_parallel expert_placement_strategy enable_eplb eplb_config "
        "enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size "
        "dbo_decode_token_threshold dbo_prefill_token_threshold fully_sharded_loras "
        "specialize_active_lora sparse_indexer_topk_backend mm_encoder_tp_mode "
        "mm_encoder_attn_backend dcp_comm_backend dcp_q_replicate"
    ),
    "it is about which host, process or device does the work": (
        "distributed_executor_backend master_addr master_port nnodes node_rank "
        "distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind numa_bind_nodes "
        "numa_bind_cpus device_ids data_parallel_size data_parallel_rank "
        "data_parallel_start_rank data_parallel_size_local data_parallel_address "
        "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb "
        "data_parallel_multi_port_external_lb data_parallel_backend dp_sync_interval "
        "disable_nccl_for_dp_synchronization _api_process_count _api_process_rank "
        "ray_workers_use_nsight renderer_num_workers fault_tolerance_config "
        "enable_fault_tolerance enable_nccl_comm_suspend"
    ),
    "it is about memory and where weights lie in it": (
        "gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override offload_backend "
        "cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group "
        "offload_prefetch_step offload_params engram_config enable_shm_tensor_arena "
        "enable_sleep_mode sleep_mode_backend sleep_mode_offload_cudagraph "
        "sleep_preserve_parameter_names enable_cumem_allocator max_loras max_lora_rank "
        "max_cpu_loras enable_lora"
    ),
    "it is about vLLM's own caches": (
        "enable_prefix_caching prefix_cache_retention_interval prefix_match_unit "
        "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
        "mm_tensor_ipc mm_ipc_gpu_memory_gb ec_transfer_config ec_manager_config "
        "kv_offloading_size kv_offloading_backend kv_transfer_config kv_events_config "
        "disable_hybrid_kv_cache_manager"
    ),
    "it is about when which tokens are computed": (
        "max_num_batched_tokens max_num_scheduled_tokens long_prefill_token_threshold "
        "long_prefill_token_threshold_adaptive max_num_seqs max_num_active_seqs "
        "max_num_queued_reqs max_num_queued_tokens enable_chunked_prefill "
        "disable_chunked_mm_input scheduler_reserve_full_isl prefill_schedule_interval watermark "
        "scheduling_policy scheduler_cls async_scheduling"
    ),
    "layers that share KV have none of their own, and it leaves out only those": (
        "kv_sharing_fast_prefill"
    ),
    "it chooses an adapter for a request, which is in the request's namespace": "default_mm_loras",
    "models with such layers are refused": (
        "mamba_config mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode "
        "mamba_backend mamba_ssu_algorithm enable_mamba_shared_prefix_checkpoint "
        "enable_mamba_fine_grained_prefix_cache enable_mamba_cache_stochastic_rounding "
        "mamba_cache_philox_rounds replayssm_buffer_len use_replayssm swa_bounded_replay "
        "gdn_prefill_backend kda_prefill_backend kda_decode_backend"
    ),
    "such engines are refused": "mm_encoder_only diffusion_config",
    "reset_cache is called after the weights have changed": "weight_transfer_config",
    "it is about logs, metrics, profiles and the end of the process": (
        "disable_log_stats aggregate_engine_logging show_hidden_metrics_for_version "
        "otlp_traces_endpoint collect_detailed_traces per_request_spec_decode_metrics "
        "kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics "
        "enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details "
        "jit_monitor_mode jit_monitor_verbose enable_mm_processor_stats profiler_config "
        "logging_config log_level log_config_file shutdown_timeout watchdog_config "
        "fail_on_environ_validation skip_mm_profiling enable_return_routed_experts"
    ),
}

#: vLLM's configurations, which may have more than their options say.
CONFIGS = (
    "model_config cache_config parallel_config scheduler_config device_config load_config "
    "offload_config attention_config aux_output_config engram_config mamba_config kernel_config "
    "lora_config speculative_config watermark_config diffusion_config structured_outputs_config "
    "observability_config logging_config quant_config compilation_config profiler_config "
    "kv_transfer_config kv_events_config ec_transfer_config ec_manager_config reasoning_config "
    "additional_config instance_id optimization_level performance_mode weight_transfer_config "
    "watchdog_config shutdown_timeout"
)

#: Settings of LoRA, by whether they are part of an adapter's namespace.
LORA = (
    "lora_dtype target_modules enable_tower_connector_lora enable_mixed_moe_lora_format "
    "enable_moe_shared_loras"
)
LORA_NOT = (
    "max_lora_rank max_loras fully_sharded_loras max_cpu_loras default_mm_loras "
    "specialize_active_lora max_lora_cls_labels"
)


def known() -> list[str]:
    groups = [*IN_NAMESPACE.values(), IN_ADAPTERS, *NOT_IN_NAMESPACE.values()]
    return [name for group in groups for name in group.split()]


def identity() -> Identity:
    return model_identity(vllm_config(Shape()), [], 16)


def test_b7_every_option_of_this_vllm_is_in_the_namespace_or_has_a_reason() -> None:
    options = {field.name for field in dataclasses.fields(EngineArgs)}
    assert options - set(known()) == set(), (
        "new options of vLLM: do they change what a layer computes? Then they belong into "
        "kvstow.vllm.identity, else give the reason here"
    )


def test_b7_no_option_is_listed_twice() -> None:
    names = known()
    assert sorted(names) == sorted(set(names))


def test_b7_every_configuration_of_this_vllm_is_known() -> None:
    configs = {field.name for field in dataclasses.fields(VllmConfig)}
    assert configs - set(CONFIGS.split()) == set(), "a new part of vLLM's configuration"


def test_b7_every_setting_of_lora_is_known() -> None:
    settings = {field.name for field in dataclasses.fields(LoRAConfig)}
    assert settings - set(f"{LORA} {LORA_NOT}".split()) == set()
    config = vllm_config(Shape())
    config.lora_config = LoRAConfig(max_lora_rank=8)
    before = adapter_options(config)
    config.lora_config = LoRAConfig(max_lora_rank=8, target_modules=["o_proj"])
    assert adapter_options(config) != before


def test_b7_the_fields_that_options_are_said_to_be_in_exist() -> None:
    conditional = {"remote code", "pages 0/0", "draft weights"}
    assert set(IN_NAMESPACE) - conditional <= set(identity().fields)


def test_b7_all_of_attention_config_counts_but_the_backend_as_asked_for() -> None:
    text = identity().fields["attention options"]
    names = [field.name for field in dataclasses.fields(AttentionConfig)]
    assert [name for name in names if f'"{name}"' not in text] == ["backend"]


@pytest.mark.parametrize("name", ["moe_backend", "linear_backend"])
def test_b7_kernels_that_quantise_activations_count(name: str) -> None:
    config = vllm_config(Shape())
    before = model_identity(config, [], 16).namespace
    setattr(config.kernel_config, name, "marlin")
    assert model_identity(config, [], 16).namespace != before
