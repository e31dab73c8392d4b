"""Runs a command with settings that give Ray time: Ray reads them when it is imported.

python tests/rdma/ray_settings.py COMMAND...
"""

from __future__ import annotations

import os
import secrets
import sys

STARTS_S = 600.0
"""How long a process of Ray may take to start, in seconds."""
_SECONDS = (
    "RAY_gcs_server_port_wait_time_s",
    "RAY_gcs_rpc_server_connect_timeout_s",
    "RAY_gcs_rpc_server_reconnect_timeout_s",
    "RAY_gcs_server_request_timeout_seconds",
    "RAY_py_gcs_connect_timeout_s",
    "RAY_raylet_start_wait_time_s",
    "RAY_worker_register_timeout_seconds",
)
_MILLISECONDS = (
    "RAY_agent_register_timeout_ms",
    "RAY_health_check_initial_delay_ms",
    "RAY_health_check_timeout_ms",
    "RAY_io_context_monitor_healthy_deadline_ms",
    "RAY_grpc_client_keepalive_timeout_ms",
    "RAY_grpc_keepalive_timeout_ms",
)
#: What idle processes of Ray do several times a second: in software emulation that alone fills a processor.
_SELDOM = (
    "RAY_raylet_report_resources_period_milliseconds",
    "RAY_raylet_check_gc_period_milliseconds",
    "RAY_raylet_death_check_interval_milliseconds",
    "RAY_gcs_pull_resource_loads_period_milliseconds",
    "RAY_grpc_client_check_connection_status_interval_milliseconds",
    "RAY_free_objects_period_milliseconds",
    "RAY_object_manager_timer_freq_ms",
    "RAY_core_worker_internal_heartbeat_ms",
    "RAY_report_worker_backlog_interval_ms",
    "RAY_task_events_report_interval_ms",
    "RAY_kill_idle_workers_interval_ms",
    "RAY_ray_syncer_message_refresh_interval_ms",
    "RAY_health_check_period_ms",
    "RAY_io_context_monitor_probe_interval_ms",
    "RAY_local_fs_monitor_interval_ms",
)
_OFF = (
    "RAY_USAGE_STATS_ENABLED",
    "RAY_memory_monitor_refresh_ms",
    "RAY_enable_metrics_collection",
    "RAY_enable_worker_prestart",
    "RAY_prestart_worker_first_driver",
    "RAY_event_stats",
    "RAY_io_context_event_loop_lag_collection_interval_ms",
    "RAY_debug_dump_period_milliseconds",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
)


def settings() -> dict[str, str]:
    """Return them for this process and all that it starts.

    Ray's workers are forks of a process that has imported Ray, see worker_template.py, so what Ray sets for
    each worker and reads at its import must be known before: the job, which is a cluster's first, and the
    process without which a worker ends.
    """
    return {
        **dict.fromkeys(_SECONDS, f"{STARTS_S:.0f}"),
        **dict.fromkeys(_MILLISECONDS, f"{STARTS_S * 1000:.0f}"),
        **dict.fromkeys(_SELDOM, "10000"),
        **dict.fromkeys(_OFF, "0"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_JOB_ID": "01000000",
        "RAY_RAYLET_PID": str(os.getpid()),
        "RAY_raylet_client_num_connect_attempts": f"{STARTS_S:.0f}",  # one a second
        "OPENBLAS_NUM_THREADS": "1",  # a process with threads cannot be forked safely
    }


if __name__ == "__main__":
    os.environ.update(settings())
    os.execvp(sys.argv[1], sys.argv[1:])
