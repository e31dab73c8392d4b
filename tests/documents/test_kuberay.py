"""The manifests for KubeRay and Ray's cluster launcher are valid, and agree with the guide and with bml."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from bml.cli.run import run
from bml.cluster.launcher.shutdown_grace import WRITING_S
from bml.topology import parse

ROOT = Path(__file__).parents[2]
SCHEMA = yaml.safe_load((Path(__file__).parent / "kuberay_schema.yaml").read_text())
TEXT = (ROOT / "examples/kuberay/rayjob.yaml").read_text()
MANIFEST = yaml.safe_load(TEXT)
PAGE = (ROOT / "docs/guides/kuberay.md").read_text()


def errors(manifest: Any) -> list[str]:
    return [each.json_path for each in jsonschema.Draft7Validator(SCHEMA).iter_errors(manifest)]


def options() -> dict[str, Any]:
    """The options of the manifest's entry point, as `bml run` reads them."""
    program, command, *words = shlex.split(MANIFEST["spec"]["entrypoint"])
    assert (program, command) == ("bml", "run")
    return run.make_context("bml run", words).params


def workers() -> dict[str, Any]:
    (group,) = MANIFEST["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    return dict(group)


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"]}


def test_the_manifest_is_a_ray_job() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert errors(MANIFEST) == []


def _unknown_field(spec: dict[str, Any]) -> None:
    spec["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["terminationGracePeriod"] = 60


def _text_for_number(spec: dict[str, Any]) -> None:
    spec["backoffLimit"] = "3"


def _number_for_text(spec: dict[str, Any]) -> None:
    spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0


def _no_template(spec: dict[str, Any]) -> None:
    del spec["rayClusterSpec"]["headGroupSpec"]["template"]


def _no_amount(spec: dict[str, Any]) -> None:
    pod = spec["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    pod["containers"][0]["resources"]["limits"]["memory"] = "much"


@pytest.mark.parametrize(
    "damage", [_unknown_field, _text_for_number, _number_for_text, _no_template, _no_amount]
)
def test_a_wrong_manifest_is_refused(damage: Callable[[dict[str, Any]], None]) -> None:
    wrong = copy.deepcopy(MANIFEST)
    damage(wrong["spec"])
    assert len(errors(wrong)) == 1


def test_the_cluster_ends_with_the_job() -> None:
    spec = MANIFEST["spec"]
    assert spec["shutdownAfterJobFinishes"]
    assert spec["ttlSecondsAfterFinished"] > 0, "KubeRay allows it only with shutdownAfterJobFinishes"


def test_a_job_that_is_tried_again_goes_on() -> None:
    """A retry makes a new cluster: without checkpoints it would train from the beginning."""
    given = options()
    assert MANIFEST["spec"]["backoffLimit"] > 0
    assert given["checkpoint"] == given["resume"]
    assert given["rejoin"]
    mounts = [each["mountPath"] for each in workers()["template"]["spec"]["containers"][0]["volumeMounts"]]
    assert any(given["checkpoint"].startswith(mount) for mount in mounts)


def test_there_are_pods_and_nics_for_all_servers() -> None:
    given, group = options(), workers()
    fabric = parse(given["fabric"])
    least, most = given["servers"]
    assert (group["minReplicas"], group["replicas"]) == (least, most)
    assert most == fabric.n_servers <= group["maxReplicas"]
    (container,) = group["template"]["spec"]["containers"]
    assert len(variables(container)["BML_NICS"].split(",")) == fabric.levels
    networks = group["template"]["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"]
    assert len(networks.split(",")) == fabric.levels


def test_a_server_takes_a_pod_of_its_own() -> None:
    (container,) = workers()["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert dict(each.split("=") for each in options()["resources"]) == {
        "CPU": limits["cpu"],
        "GPU": limits["nvidia.com/gpu"],
    }


def test_there_is_time_for_a_checkpoint_when_a_pod_ends() -> None:
    cluster = MANIFEST["spec"]["rayClusterSpec"]
    for pod in (cluster["headGroupSpec"], workers()):
        (container,) = pod["template"]["spec"]["containers"]
        drains_s = float(variables(container)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert WRITING_S < drains_s < pod["template"]["spec"]["terminationGracePeriodSeconds"]


def test_the_cluster_launcher_takes_its_file() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    config = util.prepare_config(yaml.safe_load((ROOT / "examples/ray-cluster.yaml").read_text()))
    util.validate_config(config)
    assert config["max_workers"] == len(config["provider"]["worker_ips"])


def test_the_guide_names_what_the_manifest_sets() -> None:
    named = {"BML_NICS", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "IPC_LOCK", "backoffLimit"}
    named |= {"terminationGracePeriodSeconds", "shutdownAfterJobFinishes", "k8s.v1.cni.cncf.io/networks"}
    assert all(each in TEXT and f"`{each}" in PAGE for each in named)


def test_options_in_the_guide_exist() -> None:
    shown = CliRunner().invoke(run, ["--help"]).output
    for option in set(re.findall(r"`(--[a-z-]+)", PAGE)):
        assert option in shown, option
