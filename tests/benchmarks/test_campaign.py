"""Steps of a campaign, with commands of a shell in the place of measurements."""

import json
import subprocess
import sys
from pathlib import Path

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "campaign.py"


def run(folder, steps, *arguments, within=60, gpus=2):
    file = folder / "steps.toml"
    file.write_text(steps)
    command = [sys.executable, str(CAMPAIGN), str(folder / "out"), "--steps", str(file), *arguments]
    done = subprocess.run([*command, f"--within={within}", f"--gpus={gpus}"], capture_output=True, text=True)
    kept = folder / "out" / "campaign.json"
    return done, json.loads(kept.read_text()) if kept.exists() else {}


def test_what_ended_well_is_not_run_again(tmp_path):
    steps = """
    good = {command = "echo x >> $OUT/made; echo said", seconds = 20}
    cut = {command = "echo $RESUME; echo x > $OUT/cut.json; exit 1", seconds = 20}
    bad = {command = "echo x >> $OUT/made; exit 3", seconds = 20}
    """
    for _ in range(2):
        done, kept = run(tmp_path, steps)
        assert done.returncode == 1
    assert [kept["good"]["how"], kept["bad"]["how"]] == ["done", "failed with status 3"]
    assert kept["good"]["last line"] == "said"
    assert kept["cut"]["last line"] == f"--resume {tmp_path / 'out/cut/cut.json'}"
    assert (tmp_path / "out/good/made").read_text() == "x\n"
    assert (tmp_path / "out/bad/made").read_text() == "x\nx\n"


def test_a_late_step_is_ended_with_what_it_began(tmp_path):
    steps = """late = {command = "(sleep 8; touch $OUT/late) & echo $SECONDS_LEFT; wait", seconds = 1}"""
    done, kept = run(tmp_path, steps)
    assert done.returncode == 1
    assert kept["late"]["how"] == "cut off"
    assert kept["late"]["last line"] == "1"
    left = subprocess.run(["pgrep", "-f", str(tmp_path / "out")], capture_output=True, text=True).stdout
    assert not left
    assert not (tmp_path / "out/late/late").exists()


def test_checks_run_beside_one_another_and_timings_alone(tmp_path):
    """A check waits for the other's file: alone, it would not end."""
    steps = """
    [one]
    command = "touch $OUT/../1; until ls $OUT/../2; do sleep .1; done; echo $CUDA_VISIBLE_DEVICES"
    seconds = 30
    [two]
    command = "touch $OUT/../2; until ls $OUT/../1; do sleep .1; done; sleep .5; touch $OUT/../end; echo $CUDA_VISIBLE_DEVICES"
    seconds = 30
    [timed]
    command = "test -e $OUT/../end && touch $OUT/../busy && sleep 1 && rm $OUT/../busy && echo $CUDA_VISIBLE_DEVICES"
    seconds = 30
    alone = true
    gpus = 2
    [after]
    command = "test ! -e $OUT/../busy"
    seconds = 30
    """
    done, kept = run(tmp_path, steps)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [kept[name]["last line"] for name in ("one", "two", "timed")] == ["0", "1", "0,1"]


def test_what_finds_no_time_and_no_gpus_is_said(tmp_path):
    steps = """
    large = {command = "true", seconds = 1, gpus = 4}
    long = {command = "true", seconds = 1000}
    """
    done, kept = run(tmp_path, steps, within=30)
    assert done.returncode == 1
    assert kept == {"large": {"how": "wants 4 GPUs, there are 2"}, "long": {"how": "no time was left"}}


def test_unknown_steps_are_refused(tmp_path):
    done, _ = run(tmp_path, """one = {command = "true", seconds = 1}""", "two")
    assert done.returncode == 2
    assert done.stderr.endswith("error: unknown step 'two': there are one\n")


def test_steps_of_the_repository_name_files_that_are_there():
    sys.path.insert(0, str(CAMPAIGN.parent))
    try:
        import campaign
    finally:
        sys.path.pop(0)
    steps = campaign.steps_of(CAMPAIGN.with_name("campaign.toml"))
    assert steps
    for step in steps:
        words = [word for word in step.command.split() if word.endswith((".py", ".csv")) and "$" not in word]
        assert all((campaign.ROOT / word).exists() for word in words), step
