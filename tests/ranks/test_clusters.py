"""On a cluster: the page's script under a real Slurm, and its manifest against the published schema."""

import re

import pytest
from commands import TRAINING, options_of_training, result, undisturbed, wait_for
from places import ROOT
from safetensors.torch import load_file
from slurm import Slurm, on_slurm

from common import engines
from common.checkpoint import runs
from common.loop import sha256
from interop.export import export, newest

PAGE = (ROOT / "common/CLUSTERS.md").read_text()
STEPS, ENDLESS = 60, 100_000


def block(language):
    """The page's only code block in a language."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return text


@pytest.fixture(scope="module")
def slurm():
    with Slurm() as cluster:
        yield cluster


@pytest.fixture
def submit(slurm, tmp_path):
    """A function that submits the page's script for 2 ranks on each of 2 nodes, with options of sbatch and training."""

    def sbatch(*options, training=()):
        (tmp_path / "train.sh").write_text(block("bash"))
        at = ("--parsable", f"--chdir={tmp_path}", f"--output={tmp_path}/said", "--gpus-per-node=2")
        more = ("--steps", STEPS, "--save-every", 1, "--json", "result.json", *training)
        return slurm.call("sbatch", *at, *options, tmp_path / "train.sh", *TRAINING, *more).strip()

    yield sbatch
    slurm.call("scancel", "--user=root")
    wait_for(slurm.idle)


def saved(folder):
    return runs.complete(folder / "runs/0")


@on_slurm
def test_the_script_trains_on_two_nodes_to_the_bits_of_a_run_without_slurm(slurm, submit, tmp_path):
    job = submit()
    wait_for(lambda: slurm.state(job) == "COMPLETED", within=300)
    assert result(tmp_path / "result.json") == undisturbed(4, STEPS)


def goes_on(slurm, job):
    """Make a requeued job start in 5 s, not in Slurm's two minutes.

    A slurmd that has just restarted refuses it at first: "Job credential revoked".
    """
    wait_for(slurm.idle)
    slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now+5")


SAVED, LOST = r"stopped after step \d+, as asked", r"RankLost: rank [23] was lost: rank [01] was in "


@on_slurm
@pytest.mark.parametrize(("how", "said"), [("requeued", SAVED), ("a node is lost", LOST)])
def test_a_job_that_is_interrupted_goes_on_to_the_same_bits(slurm, submit, tmp_path, how, said):
    job = submit()
    wait_for(lambda: saved(tmp_path), within=120)
    if how == "requeued":
        slurm.call("scontrol", "requeue", job)
    else:
        slurm.kill(1)
    wait_for(lambda: slurm.state(job) == "PENDING", within=120)
    assert not (tmp_path / "result.json").exists()
    if how != "requeued":
        slurm.start_daemon(1)
    goes_on(slurm, job)
    wait_for(lambda: slurm.state(job) == "COMPLETED", within=300)
    output = (tmp_path / "said").read_text()
    assert re.search(said, output)
    assert "\ngoes on from " in output
    assert result(tmp_path / "result.json") == undisturbed(4, STEPS)


@on_slurm
def test_a_job_whose_slurmd_dies_saves_and_goes_on(slurm, submit, tmp_path):
    job = submit(training=("--steps", ENDLESS))
    wait_for(lambda: saved(tmp_path), within=120)
    slurm.kill_daemon(1)
    wait_for(lambda: slurm.state(job) == "PENDING", within=120)
    slurm.start_daemon(1)
    goes_on(slurm, job)
    step = stopped_after(tmp_path)
    again = f"\ngoes on from {tmp_path}/runs/0/step-{step:08}: {step} of {ENDLESS} steps are done, on 4 ranks\n"
    wait_for(lambda: again in (tmp_path / "said").read_text(), within=120)


def stopped_after(folder):
    """The step after which a job reports that it stopped."""
    (step,) = re.findall(r"\nstopped after step (\d+), as asked", (folder / "said").read_text())
    return int(step)


@on_slurm
def test_before_the_time_limit_a_job_saves(slurm, submit, tmp_path):
    job = submit("--time=2", "--signal=TERM@30", training=("--steps", ENDLESS))
    wait_for(lambda: slurm.state(job) == "FAILED", within=180)
    assert max(saved(tmp_path)) == stopped_after(tmp_path)


@on_slurm
def test_jobs_of_an_array_share_nodes_and_train_a_run_for_each_seed(slurm, submit, tmp_path):
    array = submit("--array=0-1")
    wait_for(lambda: slurm.state(array) == "RUNNING")  # both of them
    wait_for(lambda: all(runs.complete(tmp_path / f"runs/{seed}") for seed in range(2)), within=240)
    listening = [int(port) for port in re.findall(r":(\d+) ", slurm.call("ss", "-Hlnt"))]
    assert len({port for port in listening if 20_000 <= port < 30_000}) == 2  # each has its own port
    wait_for(lambda: slurm.state(array) == "COMPLETED", within=400)
    for seed in range(2):
        export(newest(tmp_path / f"runs/{seed}"), tmp_path / "model.safetensors")
        assert sha256(load_file(tmp_path / "model.safetensors")) == undisturbed(4, STEPS, seed)[0]


# ---- Kubernetes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load(block("yaml"))


def test_the_manifest_is_one_that_the_operator_accepts_and_its_training_takes_its_options(manifest):
    """By the checks of the operator's webhook and the names of the CRD, both as of v1.9."""
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", manifest["metadata"]["name"])
    spec = manifest["spec"]
    assert set(spec) == {"runPolicy", "elasticPolicy", "pytorchReplicaSpecs"}
    ((role, replica),) = spec["pytorchReplicaSpecs"].items()
    assert role == "Worker" and replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
    policy = spec["elasticPolicy"]
    assert set(policy) == {"rdzvBackend", "minReplicas", "maxReplicas", "maxRestarts"}
    assert policy["minReplicas"] == policy["maxReplicas"] == replica["replicas"]
    (container,) = replica["template"]["spec"]["containers"]
    assert container["name"] == "pytorch" and container["image"]
    words = container["command"] + container["args"]
    module = words.index("-m")
    options = options_of_training(*words[module + 2 :])
    assert words[module + 1] in engines.ENGINES and options.resume and options.save.startswith("/runs/")


def test_the_manifest_has_the_names_and_types_of_the_published_schema(manifest):
    """Checked with the client generated from the schema: pip install kubeflow-training (tried with 1.9.4)."""
    ours = pytest.importorskip("kubeflow.training.models", reason="kubeflow-training is not installed")
    core = pytest.importorskip("kubernetes.client.models", reason="kubernetes is not installed")
    typed(manifest, "KubeflowOrgV1PyTorchJob", lambda kind: getattr(ours, kind, None) or getattr(core, kind, None))


def typed(value, kind, find):
    """Fail if a value of the manifest is not of a kind, such as "list[V1Container]"; `find` maps names to models."""
    inner = re.fullmatch(r"(list|dict)[\[(](?:str, ?)?(.+)[\])]", kind)
    if inner:
        assert isinstance(value, {"list": list, "dict": dict}[inner[1]]), (value, kind)
        for part in value if inner[1] == "list" else value.values():
            typed(part, inner[2], find)
    elif (model := find(kind)) is None:
        assert kind == "object" or type(value).__name__ == kind, (value, kind)
    else:
        names = {theirs: name for name, theirs in model.attribute_map.items()}
        for name, part in value.items():
            assert name in names, f"{kind} has no {name}"
            typed(part, model.openapi_types[names[name]], find)
        model(**{names[name]: part for name, part in value.items()})  # the model refuses a missing field
