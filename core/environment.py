"""Variables of every process that Slipstream starts."""

from __future__ import annotations

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""One thread each: several processes that share cores with more threads wait for one another (measured: ten times slower).
Offline, since models are folders; no usage reports; Ray leaves CUDA_VISIBLE_DEVICES alone for actors without GPUs."""
