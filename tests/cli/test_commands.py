"""``customops list``, ``describe``, ``bench``, ``--version``, and what all commands share."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.command_line import BARE, GOOD, ROOT, Command, in_shell, write

import customops
from customops._cli import bench, main, screen

LONG = GOOD.replace("cli::good", "cli::an_operator_with_a_really_long_name_forward")

NUMBERS = """
@custom_op("cli::scaled", mutates_args=())
def scaled(x: Tensor, by: float = 2.0, *, add: int = 1) -> Tensor:
    return x * by + add

@scaled.register_samples
def _():
    yield (torch.ones(2),)
    yield (torch.ones(3), 3.0), {"add": 2}
"""


@pytest.mark.parametrize("width", [60, 100])
def test_list(run: Command, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = run("list", write("ops.py", LONG, BARE))
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= width + 40 * (width == 60)  # the schema of one is a word too long
    assert "cli::an_operator_with_a_really_long_name_forward" in out  # in one piece
    assert re.search(r"samples +no", out) or re.search(r"cli::bare .* no ", out)
    assert "fake, backward" in out


def test_list_as_json(run: Command) -> None:
    _, out, _ = run("list", write("ops.py", GOOD), "--json")
    (op,) = json.loads(out)
    assert (op["op"], op["schema"], op["samples"]) == ("cli::good", "(Tensor x) -> Tensor", "yes")


def test_a_package_is_walked(run: Command) -> None:
    """Files that no name can import are programs."""
    write("walked/__init__.py")
    write("walked/ops.py", GOOD.replace("cli::good", "cli::walked"))
    write("walked/01_demo.py", "raise SystemExit('a program')")
    write("walked/data-gen/make.py", "raise SystemExit('a program')")
    code, out, _ = run("list", "walked")
    assert code == 0
    assert "cli::walked" in out


def test_describe(run: Command) -> None:
    code, out, _ = run("describe", "cli::bare", write("ops.py", GOOD, BARE))
    assert code == 0
    assert out == customops.default_registry["cli::bare"].describe().text() + "\n"
    code, out, _ = run("describe", "ops.py", "--json")
    assert [op["op"] for op in json.loads(out)] == ["cli::good", "cli::bare"]
    assert "aten::relu (Tensor self) -> Tensor" in run("describe", "aten::relu").out
    assert run("describe", "nobody::f").code == 2
    assert run("list", "nothing.py").code == 2


def test_an_op_of_a_schema_is_listed_with_its_kernels(run: Command) -> None:
    schema_only = """
import customops

customops.define("cli::bare", "(Tensor x) -> Tensor")
customops.impl("cli::bare", "CPU", lambda x: x * 2)
"""
    code, out, _ = run("list", "--json", write("ops.py", GOOD, schema_only))
    assert code == 0
    assert {each["op"]: each["kernels"] for each in json.loads(out)}["cli::bare"] == "CPU"


def test_describe_op_of_torch_library_in_a_file(run: Command) -> None:
    file = write("ops.py", """
@torch.library.custom_op("cli_torch::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2
""")  # fmt: skip
    code, out, _ = run("describe", "cli_torch::twice", file)
    assert code == 0
    assert out.startswith("cli_torch::twice (Tensor x) -> Tensor\n")
    assert run("describe", file).code == 2
    assert "there is no op cli_torch::thrice" in run("describe", "cli_torch::thrice", file).err


@pytest.mark.parametrize("option", ["--samples=0", "--samples=-1", "--seconds=0", "--seconds=-1", "--seconds=nan"])
def test_bench_refuses_what_measures_nothing(run: Command, option: str) -> None:
    with pytest.raises(SystemExit):
        run("bench", write("ops.py", GOOD), option)


def test_bench(run: Command) -> None:
    code, out, _ = run("bench", write("ops.py", GOOD, NUMBERS, BARE), "--seconds", "0.002", "--samples", "2", "--json")
    assert code == 0
    costs = json.loads(out)
    assert [cost["op"] for cost in costs] == ["cli::good", "cli::good", "cli::scaled", "cli::scaled", "cli::bare"]
    for cost in costs[:-1]:
        assert min(cost["kernel"], cost["call"], cost["bare"]) > 0
        assert cost["dispatch"] == pytest.approx(max(cost["call"] - cost["kernel"], 0))
    assert [cost["with_grad"] is None for cost in costs[:-1]] == [False, False, True, True]
    assert costs[3]["sample"] == "x: float32[3], by: 3.0, add: 2"
    assert "no samples" in costs[-1]["problem"]
    assert not [name for name in vars(torch.ops) if name.startswith("customops_bench")]


def test_bench_of_nothing(run: Command) -> None:
    code, out, _ = run("bench", write("ops.py", BARE))
    assert (code, out) == (2, "cli::bare: no samples; attach some with @bare.register_samples\n")
    samples = "bare.register_samples(lambda: [(torch.ones(2),)])"
    raising = BARE.replace("return x * 2", "raise ValueError('boo')") + samples
    code, out, _ = run("bench", write("others.py", raising))
    assert code == 2
    assert "ValueError: boo" in out


def test_a_table_of_costs(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    found = bench.Cost("cli::f", "x: float32[2]", 10e-6, 4e-6, 5e-6, None)
    monkeypatch.setattr(bench, "costs_of", lambda *_: [found])
    monkeypatch.setenv("COLUMNS", "100")
    _, out, _ = run("bench", write("ops.py", GOOD))
    assert out.splitlines()[2].split("  ")[0] == "cli::f"
    assert out.splitlines()[2].split() == "cli::f 10 us 4 us 6 us 5 us - x: float32[2]".split()
    monkeypatch.setenv("COLUMNS", "60")
    assert "cli::f\n  call       10 us\n" in run("bench", "ops.py").out


# -- all commands ------------------------------------------------------------------------------


def test_without_a_command_there_is_help(run: Command) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    assert [name for name in main.COMMANDS if f"\n    {name} " not in out and f"\n    {name}\n" not in out] == []


@pytest.mark.parametrize(
    ("arguments", "usage", "message"),
    [
        ("chek ops.py", "customops [-h]", "customops: error: there is no command chek; did you mean check?"),
        ("zzz", "customops [-h]", "customops: error: there is no command zzz; there are check, list, describe"),
        ("check ops.py --efort=quick", "customops check", "there is no option --efort=quick; did you mean --effort?"),
        ("check ops.py --only faketensro", "customops check", "--only faketensro: no such check; did you mean test_"),
        ("bench ops.py --samples 0", "customops bench", "customops bench: error: --samples 0: at least 1"),
        ("list", "customops list", "customops list: error: the following arguments are required: TARGET"),
        ("doctor ops.py", "customops doctor", "customops doctor: error: it takes no further argument: ops.py"),
        ("new", "customops new", "the following arguments are required: {"),
        ("-x list ops.py", "customops [-h]", "there is no option -x"),
        ("''", "customops [-h]", "there is no command ; there are check"),
        ("doctor ''", "customops doctor", "customops doctor: error: it takes no further argument: ''"),
        ("tune ops.py --out nowhere/t.toml", "customops tune", "--out nowhere/t.toml: there is no directory nowhere"),
    ],
)
def test_a_refused_command_shows_its_usage(
    run: Command, capsys: pytest.CaptureFixture[str], arguments: str, usage: str, message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(*shlex.split(arguments))
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: {usage}")
    assert message in err


def test_misspelled_ops(run: Command) -> None:
    write("ops.py", GOOD)
    for arguments in (
        ("describe", "cli::goood", "ops.py"),
        ("describe", "aten::rleu"),
        ("check", "ops.py", "cli::goood"),
    ):
        code, _, err = run(*arguments)
        assert code == 2
        assert f"fix:      did you mean {'aten::relu' if 'aten::rleu' in arguments else 'cli::good'}?" in err


@pytest.mark.process
def test_a_command_loads_what_it_uses() -> None:
    program = "import sys; from customops._cli.main import main; main(['list', 'examples/rotary.py', '--json']); "
    program += "print([m for m in ('torch._dynamo', 'customops.checks', 'customops.backend') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.endswith("]\n[]\n")


def test_version(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run("--version")
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith(f"customops {customops.__version__}, torch {torch.__version__}")


def test_help_of_each_command(
    run: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for command in ("check", "list", "describe", "bench", "stubs", "doctor", "backend-report"):
        with pytest.raises(SystemExit):
            run(command, "--help")
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


@pytest.mark.process
def test_as_a_module_and_as_a_script() -> None:
    """rich and colours are not needed; a reader that stops reading is no error."""
    code, out, err = in_shell("describe", "aten::relu", FORCE_COLOR="")
    assert (code, err) == (0, "")
    assert out.startswith("aten::relu (Tensor self) -> Tensor\n")
    text = (ROOT / "pyproject.toml").read_text()
    assert 'customops = "customops._cli.main:main"' in text
    program = "import sys; sys.modules['rich'] = None; from customops._cli.main import main; sys.exit(main())"
    pipe = f"{sys.executable} -c \"{program}\" describe 'aten::sin' aten::cos | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, cwd=ROOT, env=os.environ, check=True)
    assert done.stdout.strip() in ("0", str(main.PIPE_CLOSED))
    assert done.stderr == ""


def test_wrapping_keeps_fields() -> None:
    text = "op: a problem\n  fix:      one two three four five six seven eight nine ten"
    assert screen.wrapped(text, 40).splitlines() == [
        "op: a problem",
        "  fix:      one two three four five six",
        "            seven eight nine ten",
    ]


TUNED = """
import time

@custom_op("cli::tuned", mutates_args=())
def tuned(x: Tensor) -> Tensor:
    time.sleep(0.001)
    return x * 2

tuned.register_kernel("cpu", lambda x: x * 2, name="quick", priority=-1)
tuned.register_kernel("cpu", lambda x: x * 3, name="wrong", priority=-2)

@tuned.register_samples
def _():
    yield (torch.ones(3),)
"""


def test_tune(run: Command) -> None:
    code, out, err = run("tune", write("ops.py", TUNED, BARE), "--out", "tuned.toml")
    assert (code, err) == (0, "tuning 1/1 cli::tuned\n")
    assert re.search(r"^cli::tuned x=float32\[4\]: quick \(default [\d.]+ ms, quick [\d.]+ us\)$", out, re.MULTILINE)
    assert "  without wrong: its results differ from those of default: " in out
    assert out.endswith("1 choice in tuned.toml\n")
    (line,) = Path("tuned.toml").read_text().splitlines()[1:]
    assert re.fullmatch(r'"cli::tuned \| cpu .* \| torch [\d.]+ \| x=float32\[4\]" = "quick"', line)
    assert run("tune", write("bare.py", BARE.replace("bare", "other")), "--out", "none.toml").code == 2
    code, out, err = run(
        "tune", write("unsampled.py", TUNED.replace("cli::tuned", "cli::u").split("@tuned.reg")[0]), "--out", "t"
    )
    assert (code, out) == (1, "")
    assert "there are no samples to tune with" in err
