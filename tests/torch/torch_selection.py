"""Which of PyTorch's own tests of torch.distributed are run on backend bml, and why the others are not."""

import re
from collections.abc import Iterable

LEFT_OUT = {
    r"cuda|_gpu|nccl": "they need GPUs, or are about NCCL",
    r"monitored_barrier|mixed_backend": "they are about gloo or NCCL",
    r"sparse_all_reduce": "sparse tensors are refused",
    r"SyncBatchNorm|_bn_|sync_bn": "SyncBatchNorm takes tensors on GPUs",
    r"test_DistributedDataParallel(_non_default_stream|_with_amp.*)?$": "they need GPUs",
    r"test_(barrier_timeout_arg|broadcast_object_list|ddp_has_finalized)$": "skipped by PyTorch",
    r"ddp_model_diff_shape_across_ranks|sparse_error_with_logger": "skipped by PyTorch",
    r"ddp_profiling_(autograd_profiler|execution_trace)|subgroups(_by_enumeration)?$": "skipped by PyTorch",
    r"coalescing_manager|batch_isend_irecv_op_err|DistributedSampler_padding": "skipped without GPUs",
    r"average_parameters|model_averager|post_localSGD|skip_all_reduce_unused": "skipped without GPUs",
    r"stateless_api|static_graph_multi_forward|output_unused_in_loss": "skipped without GPUs",
    r"undefined_grad|verify_model|different_graph|detect_ddp": "skipped without GPUs",
    r"invalid_static_graph|data_parallel_params|without_logger": "skipped without GPUs",
    r"new_subgroups_": "skipped without GPUs",
}
"""Reasons by regular expressions that are found in the name; tests of DDP that need GPUs follow."""

NEED_GPUS = (
    "apply_optim_in_backward",
    "apply_optim_in_backward_grad_as_bucket_view_false",
    "apply_optim_in_backward_ignored_params",
    "broadcast_buffer",
    "broadcast_buffer_via_hook",
    "broadcast_buffers_deprecation_warning",
    "bucket_cap_mb_list",
    "buffer_hook_allreduce",
    "buffer_hook_allreduce_return_future",
    "build_debug_param_to_name_mapping",
    "build_debug_param_to_name_mapping_requires_grad",
    "comm_hook_logging",
    "compile_static_graph",
    "control_flow_different_across_ranks",
    "control_flow_same_across_ranks",
    "device",
    "device_mesh_initialization",
    "forward_backward_hook",
    "grad_div_uneven_inputs",
    "hook_parity_allreduce",
    "hook_parity_allreduce_process_group",
    "hook_parity_powerSGD",
    "hook_pickling_powerSGD",
    "ignore_params_arg",
    "inference",
    "init_sync_buffers_with_forward_sync_buffers_false",
    "join_model_equivalence",
    "join_respects_forward_sync_buffers_false",
    "model_diff_num_params_across_ranks",
    "multiple_nested_unused_params_err_ignore_params",
    "multiple_nested_unused_params_error",
    "namedtuple",
    "native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
    "native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
    "native_mixed_precision_ignored_params",
    "native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
    "native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
    "new_tensor_in_fwd",
    "new_tensor_in_fwd_static_graph",
    "profiling_torch_profiler",
    "python_error_logged",
    "remove_autograd_hooks",
    "returns_tensor_with_no_grad",
    "shared_grad_acc_unused_params",
    "sink_noclone",
    "static_graph_nested_types",
    "sync_module_states",
    "uneven_input_exception",
    "uneven_input_join_disable",
    "uneven_inputs",
    "unused_params_rebuild_buckets_exception",
    "zero_output_features",
)
"""Tests `test_ddp_...` that PyTorch skips where there is no GPU for every rank."""

_EIGHT = re.compile(r"(?<!full)_group(_(min|max|sum|product))?$")
_FOUR = ("SyncBatchNorm_process_group", "hook_parity_allreduce_process_group")

SAMPLE = [
    "test_all_reduce_sum",
    "test_all_reduce_full_group_max",
    "test_all_reduce_sum_complex",
    "test_all_reduce_coalesced_sum",
    "test_all_gather",
    "test_all_gather_object_default_pg",
    "test_all_to_all_single_unequal_split",
    "test_barrier",
    "test_broadcast",
    "test_gather",
    "test_scatter",
    "test_reduce_max",
    "test_reduce_sum",
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
]
"""Those that the gate runs."""


AS_GLOO = "accumulate_gradients_no_sync"
"""Tests with this in their name take their path for the CPU only if the backend is called gloo."""


def reason(name: str) -> str:
    """Why a test is left out; empty for one that is selected."""
    if name.removeprefix("test_ddp_") in NEED_GPUS:
        return "PyTorch skips it where there is no GPU"
    return next((why for pattern, why in LEFT_OUT.items() if re.search(pattern, name)), "")


def selected(names: Iterable[str]) -> list[str]:
    """Those of PyTorch's tests that are run."""
    return [name for name in names if not reason(name)]


def n_ranks(name: str) -> int:
    """How many ranks a test needs: those of groups of some ranks need eight."""
    return 8 if _EIGHT.search(name) and not name.endswith(_FOUR) else 4
