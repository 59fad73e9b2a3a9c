"""What of TensorFlow decides the bits of a result."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

# No public name tells whether devices are in use, nor asks for the determinism of operations.
from tensorflow.python.eager import context
from tensorflow.python.framework import config
from tensorflow.python.util import _pywrap_util_port

from unbroken.frameworks.tensorflow.processes import this_worker


def environment() -> dict[str, object]:
    """Return versions, threads, devices, kernels and precision. No device is woken up for it."""
    build = tf.sysconfig.get_build_info()
    threads = tf.config.threading
    return {
        "tensorflow": str(tf.__version__),
        "tensorflow_cuda": build.get("cuda_version"),
        "tensorflow_cudnn": build.get("cudnn_version"),
        "tensorflow_threads": {
            "within_operations": threads.get_intra_op_parallelism_threads() or _processors(),
            "between_operations": threads.get_inter_op_parallelism_threads() or _processors(),
        },
        "tensorflow_deterministic": bool(config.is_op_determinism_enabled()),
        "tensor_float_32": bool(tf.config.experimental.tensor_float_32_execution_enabled()),
        "tensorflow_onednn": bool(_pywrap_util_port.IsMklEnabled()),
        "tensorflow_jit": tf.config.optimizer.get_jit() or "off",
        "tensorflow_functions_run_eagerly": bool(tf.config.functions_run_eagerly()),
        **_devices(),
        **_place_among_workers(),
    }


def _processors() -> int:
    # As many threads as this process may use processors are what it takes by itself.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _place_among_workers() -> dict[str, object]:
    worker = this_worker()
    return {} if worker is None else {"rank": worker.rank, "world_size": worker.count}


def _devices() -> dict[str, object]:
    eager: Any = context.context()
    if eager._context_handle is None:
        return {}
    devices = tf.config.list_logical_devices()
    graphics = [
        tf.config.experimental.get_device_details(device) for device in tf.config.get_visible_devices("GPU")
    ]
    return {
        "tensorflow_devices": [device.name.removeprefix("/device:") for device in devices],
        "tensorflow_graphics": [str(details.get("device_name")) for details in graphics],
        "tensorflow_memory_growth": [
            bool(tf.config.experimental.get_memory_growth(device))
            for device in tf.config.get_visible_devices("GPU")
        ],
    }
