#!/usr/bin/env bash
# The tests of the verbs transport on real RDMA, in the virtual machine of vm.sh. Exit status 77: this machine
# cannot run it, and says why. Arguments go to pytest, e.g. -k link.
cd "$(dirname "$0")/../.."
version=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$version" = 3.11 ] || { echo "tests/rdma: skipped, Debian's pyverbs is for Python 3.11 and .venv has $version" >&2; exit 77; }
exec tests/rdma/vm.sh -n 9 -t 480 .venv/bin/python -m pytest -q -s -p no:cacheprovider --timeout 240 \
  --durations 0 tests/rdma/rdma_jobs.py tests/rdma/rdma_links.py "$@"
