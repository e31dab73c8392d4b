#!/usr/bin/env bash
# The tests of the verbs transport on real RDMA, in the virtual machine of vm.sh: first with the host's clock,
# then, for speed, with one that counts instructions. With --ray, a job on Ray instead of these.
# Exit status 77: this machine cannot run it, and says why. Arguments go to pytest, e.g. -k link.
cd "$(dirname "$0")/../.."
version=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$version" = 3.11 ] || {
  echo "tests/rdma: skipped, Debian's pyverbs is for Python 3.11 and .venv has ${version:-none}" >&2
  exit 77
}
pytest=(.venv/bin/python -m pytest -q -s -p no:cacheprovider --durations 0)
if [ "${1:-}" = --ray ]; then
  shift
  # Once here, so that all modules are compiled: the guest cannot keep what it compiles.
  "${pytest[@]}" --collect-only tests/rdma/rdma_ray.py >/dev/null || exit 1
  exec tests/rdma/vm.sh -n 4 -t 1800 \
    .venv/bin/python tests/rdma/ray_settings.py "${pytest[@]}" --timeout 1700 tests/rdma/rdma_ray.py "$@"
fi
tests/rdma/vm.sh -n 9 -t 900 "${pytest[@]}" --timeout 240 tests/rdma/rdma_jobs.py tests/rdma/rdma_links.py "$@"
first=$?
[ $first = 0 ] || [ $first = 5 ] || exit $first # 5: no test is chosen by the arguments
"${pytest[@]}" --collect-only tests/rdma/rdma_speed.py "$@" >/dev/null
chosen=$?
[ $chosen = 5 ] && exit $first
[ $chosen = 0 ] || exit $chosen
exec tests/rdma/vm.sh -n 2 -t 180 -i "${pytest[@]}" --timeout 240 tests/rdma/rdma_speed.py "$@"
