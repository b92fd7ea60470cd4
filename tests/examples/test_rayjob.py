"""examples/cluster/rayjob.yaml against KubeRay's schema of its fields, the image, the config and the plan."""

import json
import re
import shlex
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import pytest
import yaml
from dockerfile_parse import DockerfileParser

from grpo_dist.plan.commands import load_config
from tests.messages import says

ROOT = Path(__file__).parents[2]
CHECK = "trainer.dry_run=config"  # the data lies on the cluster's disk
SCHEMA = yaml.safe_load((ROOT / "tests/golden/kuberay_rayjob.yaml").read_text())


def manifest() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "examples/cluster/rayjob.yaml").read_text())


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    return manifest()["spec"]


@pytest.fixture(scope="module")
def image() -> dict[str, str]:
    steps = DockerfileParser(str(ROOT / "Dockerfile"), fileobj=None).structure
    return {step["instruction"]: step["value"] for step in steps}


def pods(spec: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [spec["rayClusterSpec"]["headGroupSpec"], *spec["rayClusterSpec"]["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as kubectl holds a manifest against it: a field that it does not name is an error."""
    fields = {name: strict(each) for name, each in schema.get("properties", {}).items()}
    found = schema | ({"properties": fields, "additionalProperties": False} if fields else {})
    return found | ({"items": strict(schema["items"])} if "items" in schema else {})


def faults(job: dict[str, Any]) -> list[str]:
    errors = jsonschema.Draft7Validator(strict(SCHEMA)).iter_errors(job)
    return [f"{error.json_path}: {error.message}" for error in errors]


def test_kuberay_takes_the_manifest() -> None:
    job = manifest()
    assert (job["apiVersion"], job["kind"], faults(job)) == ("ray.io/v1", "RayJob", [])
    cluster = job["spec"]["rayClusterSpec"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", job["metadata"]["name"])
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52), "since when Ray has its token"
    assert job["spec"].get("ttlSecondsAfterFinished", 0) >= 0


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("spec.backofLimit", 3, ["'backofLimit'"]),
        ("spec.backoffLimit", "3", ["$.spec.backoffLimit", "'3'"]),
        ("spec.rayClusterSpec.authOptions.mode", "tokens", ["authOptions.mode", "'tokens'", "'token'"]),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.containers", None, ["template.spec.containers"]),
    ],
)
def test_what_the_schema_refuses_is_found(path: str, value: Any, named: list[str]) -> None:
    job = place = manifest()
    *way, last = path.split(".")
    for step in way:
        place = place[step]
    place[last] = value
    says(faults(job), *named)


def test_its_command_is_a_config_for_the_gpus_that_it_asks_for(spec: dict[str, Any], image: dict[str, str]) -> None:
    words = shlex.split(spec["entrypoint"])
    entry = json.loads(image["ENTRYPOINT"])
    assert words[: len(entry)] == entry
    assert not set(spec["entrypoint"]) & set("'\"$[]{}*"), "two shells read it"
    config, _ = load_config([*words[len(entry) :], CHECK])
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == config.trainer.nnodes == 2
    (container,) = workers["template"]["spec"]["containers"]
    for kind in ("requests", "limits"):
        assert container["resources"][kind]["nvidia.com/gpu"] == str(config.trainer.n_gpus_per_node)
    assert spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"] == {"num-gpus": "0"}
    assert (spec["backoffLimit"] > 0, spec["shutdownAfterJobFinishes"]) == (True, True)
    assert "trainer.save_interval_minutes=" in spec["entrypoint"]
    assert "resume_mode" not in spec["entrypoint"], "a new start goes on from the newest checkpoint"


def test_every_pod_has_the_image_its_ray_and_user_and_no_secret(spec: dict[str, Any], image: dict[str, str]) -> None:
    constraints = (ROOT / "constraints/gpu.txt").read_text().splitlines()
    assert f"ray=={spec['rayClusterSpec']['rayVersion']}" in constraints
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    for pod in pods(spec):
        (container,) = pod["containers"]
        assert container["image"] == "grpo_dist"
        secret = [each for each in container["env"] if "KEY" in each["name"] or "TOKEN" in each["name"]]
        assert [list(each["valueFrom"]) for each in secret] == [["secretKeyRef"]] * 2, "no secret in the file"
        assert pod["securityContext"] == {"fsGroup": int(image["USER"])}


def test_paths_lie_on_the_shared_disk_and_shared_memory_has_room(spec: dict[str, Any]) -> None:
    values = [word.partition("=")[2] for word in shlex.split(spec["entrypoint"])]
    paths = [PurePosixPath(value) for value in values if value.startswith("/")]
    assert len(paths) == 3
    for pod in pods(spec):
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes.keys() == mounts.keys()
        (claim,) = [name for name, volume in volumes.items() if "persistentVolumeClaim" in volume]
        cache = [PurePosixPath(each["value"]) for each in container["env"] if each["name"] == "HF_HOME"]
        assert all(path.is_relative_to(mounts[claim]) for path in [*paths, *cache])
        (memory,) = [name for name, path in mounts.items() if path == "/dev/shm"]
        assert volumes[memory]["emptyDir"]["medium"] == "Memory"
        sizes = (volumes[memory]["emptyDir"]["sizeLimit"], container["resources"]["limits"]["memory"])
        shared, limit = (int(size.removesuffix("Gi")) for size in sizes)
        assert 16 <= shared < limit


def test_agents_and_workers_find_each_other_and_nobody_else_does(spec: dict[str, Any]) -> None:
    text = (ROOT / "examples/cluster/agents.yaml").read_text()
    found = {(each["kind"], each["metadata"]["name"]): each["spec"] for each in yaml.safe_load_all(text)}
    words = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   actor_rollout_ref.")]
    agent = load_config([*shlex.split(spec["entrypoint"])[3:], *words, CHECK])[0].actor_rollout_ref.rollout.agent
    (port,), name = found["Service", "agents"]["ports"], "agents"
    assert agent.agent_kwargs["url"] == f"http://{name}:{port['port']}/play"
    assert (agent.default_agent_loop, agent.endpoint_host) == ("external", "auto")
    agents = found["Service", name]["selector"]
    assert found["Deployment", name]["template"]["metadata"]["labels"] == agents
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    workers = {"ray.io/is-ray-node": "yes", "ray.io/group": group["groupName"]}  # KubeRay's labels
    policy, of_workers = found["NetworkPolicy", name], found["NetworkPolicy", "rollout-workers"]
    (out,), (asks, answers) = policy["egress"], of_workers["ingress"]
    assert of_workers["podSelector"]["matchLabels"] == workers
    assert out["to"] == [{"podSelector": {"matchLabels": workers}}]
    assert answers == {"from": [{"podSelector": {"matchLabels": agents}}], "ports": out["ports"]}
    assert asks == {"from": policy["ingress"][0]["from"]}, "the cluster's own pods"
