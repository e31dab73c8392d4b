"""What is read of a machine's health, from files as the kernel writes them."""

from pathlib import Path

import pytest

from bml.io.vitals import HostVitals
from bml.predict.trouble import HostSample, Trouble

GIB = 1 << 30

PRESSURE = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_rates_are_those_since_the_last_sample(tmp_path: Path) -> None:
    write(tmp_path, proc__pressure__memory=PRESSURE.format(1_000_000), proc__vmstat="pswpin 7\npswpout 100\n")
    write(tmp_path, proc__meminfo="MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    vitals = HostVitals(tmp_path)
    assert vitals.sample(10.0) == HostSample(free_nbytes=2048 * 1024)
    write(tmp_path, proc__pressure__memory=PRESSURE.format(1_500_000), proc__vmstat="pswpin 7\npswpout 300\n")
    second = vitals.sample(12.0)
    assert second.stalled_share == pytest.approx(0.25)
    assert second.swapped_pages_s == pytest.approx(100)


@pytest.mark.parametrize(
    ("cgroup", "folder", "most", "taken"),
    [
        ("0::/job/server\n", "sys/fs/cgroup/job/server", "memory.max", "memory.current"),
        (
            "4:memory:/job\n0::/\n",
            "sys/fs/cgroup/memory/job",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        ),
    ],
)
def test_the_limit_of_a_group_of_processes_counts(
    tmp_path: Path, cgroup: str, folder: str, most: str, taken: str
) -> None:
    write(tmp_path, proc__meminfo="MemAvailable: 4096 kB\n", proc__self__cgroup=cgroup)
    write(tmp_path / folder, **{most: "1000000\n", taken: "400000\n"})
    assert HostVitals(tmp_path).sample(0.0).free_nbytes == 600_000


@pytest.mark.parametrize(
    ("cgroup", "folder", "most", "taken", "stat"),
    [
        (
            "0::/\n",
            "sys/fs/cgroup",
            "memory.max",
            "memory.current",
            "anon 4\ninactive_file {}\nactive_file {}\nslab_reclaimable 1000\nfile_dirty 7\n",
        ),
        (
            "4:memory:/job\n",
            "sys/fs/cgroup/memory/job",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "cache 9\ninactive_file 5\ntotal_inactive_file {}\ntotal_active_file {}\n",
        ),
    ],
    ids=["v2", "v1"],
)
def test_data_that_is_read_from_files_does_not_fill_the_memory_of_a_group(
    tmp_path: Path, cgroup: str, folder: str, most: str, taken: str, stat: str
) -> None:
    write(tmp_path, proc__self__cgroup=cgroup)
    write(tmp_path / folder, **{most: "1"})
    vitals, trouble, limit, anon, found = HostVitals(tmp_path), Trouble(0, 0.1), 16 * GIB, 4 * GIB, []
    for second in range(60):
        cached = min(limit - anon, second * GIB // 4)
        slab = 1000 if "slab" in stat else 0
        stats = stat.format(cached - cached // 3, cached // 3)
        files = {most: f"{limit}\n", taken: f"{anon + cached + slab}\n", "memory.stat": stats}
        write(tmp_path / folder, **files)
        sample = vitals.sample(float(second))
        assert sample.free_nbytes == limit - anon
        found += trouble.sample({}, {}, sample, 1, float(second))
    assert not found


def test_errors_and_the_hottest_sensor(tmp_path: Path) -> None:
    write(tmp_path, sys__devices__system__edac__mc__mc0__ce_count="2\n")
    write(tmp_path, sys__devices__system__edac__mc__mc1__ce_count="3\n")
    write(
        tmp_path,
        sys__class__hwmon__hwmon0__temp1_crit="100000",
        sys__class__hwmon__hwmon0__temp1_input="61000",
    )
    write(
        tmp_path,
        sys__class__hwmon__hwmon1__temp2_crit="90000",
        sys__class__hwmon__hwmon1__temp2_input="70000",
    )
    found = HostVitals(tmp_path).sample(0.0)
    assert (found.corrected_errors, found.headroom_c) == (5, 20.0)


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    vitals = HostVitals(tmp_path)
    vitals.sample(0.0)
    assert vitals.sample(1.0) == HostSample()
