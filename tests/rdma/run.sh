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
pytest=(.venv/bin/python -m pytest -q -s -p no:cacheprovider --timeout 240 --durations 0)
tests/rdma/vm.sh -n 9 -t 900 "${pytest[@]}" tests/rdma/rdma_jobs.py tests/rdma/rdma_links.py "$@"
first=$?
[ $first = 0 ] || [ $first = 5 ] || exit $first # 5: no test is chosen by the arguments
tests/rdma/vm.sh -n 2 -t 180 -i "${pytest[@]}" tests/rdma/rdma_speed.py "$@"
second=$?
[ $second = 5 ] && exit $first
exit $second
