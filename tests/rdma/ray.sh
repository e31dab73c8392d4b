#!/usr/bin/env bash
# A job on Ray over verbs, in the virtual machine of vm.sh. Exit status 77: this machine cannot run it, and says why.
# Arguments go to pytest.
cd "$(dirname "$0")/../.."
version=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$version" = 3.11 ] || {
  echo "tests/rdma: skipped, Debian's pyverbs is for Python 3.11 and .venv has ${version:-none}" >&2
  exit 77
}
# Ray reads these when it is imported. How long Ray's own processes wait for each other:
for name in gcs_server_port_wait_time gcs_rpc_server_connect_timeout gcs_rpc_server_reconnect_timeout \
  py_gcs_connect_timeout raylet_start_wait_time; do export "RAY_${name}_s=600"; done
for name in gcs_server_request_timeout worker_register_timeout; do export "RAY_${name}_seconds=600"; done
for name in agent_register_timeout health_check_initial_delay health_check_timeout grpc_client_keepalive_timeout \
  grpc_keepalive_timeout io_context_monitor_healthy_deadline; do export "RAY_${name}_ms=600000"; done
export RAY_raylet_client_connect_timeout_milliseconds=600000
# What Ray does without being asked:
export RAY_USAGE_STATS_ENABLED=0 RAY_memory_monitor_refresh_ms=0 RAY_enable_metrics_collection=0 RAY_event_stats=0
export RAY_enable_worker_prestart=0 RAY_prestart_worker_first_driver=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
