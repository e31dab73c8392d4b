#!/usr/bin/env bash
# The tests of the verbs transport on real RDMA, in the virtual machine of vm.sh: first with the host's clock,
# then, for speed, with one that counts instructions. Exit status 77: this machine cannot run it, and says why.
# Arguments go to pytest, e.g. -k link.
cd "$(dirname "$0")/../.."
version=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$version" = 3.11 ] || {
  echo "tests/rdma: skipped, Debian's pyverbs is for Python 3.11 and .venv has ${version:-none}" >&2
  exit 77
}
# With --ray a Ray job instead. The clock counts instructions there, too: one time-out of Ray cannot be set. Modules
# are compiled before, on the host, by importing them: Python's compiler would be half of what is emulated.
if [ "${1:-}" = --ray ]; then
  shift
  env -u PYTHONDONTWRITEBYTECODE .venv/bin/python - <<'PY'
import importlib
for name in ("dashboard.dashboard", "dashboard.head", "dashboard.agent", "_private.workers.default_worker",
             "_private.log_monitor", "_private.runtime_env.agent.main", "autoscaler._private.monitor"):
    try:
        importlib.import_module(f"ray.{name}")
    except ImportError:  # another release of Ray has it elsewhere; it is compiled in the guest then
        pass
from bml.cluster.ray import fleet
from bml.transport import verbs
PY
  BML_RDMA_VM_MEM=4G exec tests/rdma/vm.sh -n 4 -t 3000 -i \
    env RAY_DASHBOARD_STARTUP_TIMEOUT_S=300 RAY_worker_register_timeout_seconds=600 \
    RAY_agent_register_timeout_ms=600000 RAY_enable_metrics_collection=0 RAY_prestart_worker_first_driver=0 \
    .venv/bin/python -m pytest -q -s -p no:cacheprovider --timeout 2000 tests/rdma/rdma_ray.py "$@"
fi
pytest=(.venv/bin/python -m pytest -q -s -p no:cacheprovider --timeout 240 --durations 0)
tests/rdma/vm.sh -n 9 -t 900 "${pytest[@]}" tests/rdma/rdma_jobs.py tests/rdma/rdma_links.py "$@"
first=$?
[ $first = 0 ] || [ $first = 5 ] || exit $first # 5: no test is chosen by the arguments
tests/rdma/vm.sh -n 2 -t 180 -i "${pytest[@]}" tests/rdma/rdma_speed.py "$@"
second=$?
[ $second = 5 ] && exit $first
exit $second
