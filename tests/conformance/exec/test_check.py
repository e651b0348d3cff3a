"""The check of the protocol passes programs that speak it, and says of others what they said."""

import shlex
import sys

import pytest

from attnconform.conformance.exec.check import check_program


@pytest.fixture
def program(tmp_path, attention_program):
    """A command made of Python that stands before the backend in C++ and may change each line either way."""

    def make(body):
        script = tmp_path / "program.py"
        script.write_text(
            "import json, subprocess, sys\n"
            f"inner = subprocess.Popen([{attention_program!r}], stdin=-1, stdout=-1, text=True, bufsize=1)\n"
            "def ask(line):\n"
            "    inner.stdin.write(line)\n"
            "    return inner.stdout.readline()\n"
            "for line in sys.stdin:\n"
            f"    {body}\n"
        )
        return shlex.join([sys.executable, str(script)])

    return make


def test_two_independent_programs_speak_the_protocol(attention_program, onnx_program):
    assert check_program(attention_program) == []
    assert check_program(onnx_program) == []


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("print('hello', flush=True)", "start: answered 'start' with 'hello'"),
        ("sys.exit(3)", "start: ended with exit code 3 while 'start' was asked"),
        ("print(ask(line).replace(':1,', ':9,'), end='', flush=True)", "start: speaks protocol 9, but this is 1"),
        ("print(ask(line).replace('OneOf', 'All'), end='', flush=True)", "start: answered 'capabilities' with"),
        ("json.loads(line); print(ask(line), end='', flush=True)", "nonsense: a line that is no JSON: ended with exit"),
        (
            "print(ask(line).replace('failed', 'stopped'), end='', flush=True)",
            "nonsense: a request of an unknown type was answered with Stopped()",
        ),
        (
            "print(ask(line).replace('refused', 'failed'), end='', flush=True)",
            "refusals: L1.refusal.",
        ),
        (
            "ran = '\"run\"' in line and json.dumps({'type': 'ran', 'id': json.loads(line)['id']}); "
            "print(ran or ask(line).strip(), flush=True)",
            "missing_file: a run without an inputs file was answered with ran",
        ),
        (
            "reply = ask(line); '\"run\"' in line and open(json.loads(line)['inputs'], 'ab').write(b' '); "
            "print(reply, end='', flush=True)",
            "forward: the inputs file was changed",
        ),
        ("print(ask(line), end='', flush=True) if 'stop' not in line else sys.exit(0)", "stop: ended with exit code 0"),
        ("print('ready', end='\\n' + ask(line), flush=True)", "start: answered 'start' with 'ready'"),
    ],
)
def test_a_fault_of_speech_is_named(program, body, fault):
    faults = check_program(program(body))
    assert any(found.startswith(fault) for found in faults), faults
    assert all("\n" not in found for found in faults)


def test_a_line_too_many_is_a_fault(program):
    faults = check_program(program("print(ask(line) + 'done', flush=True)"))
    assert len(faults) == 1
    assert faults[0].startswith("start: ")
    assert "'done'" in faults[0]


def test_a_program_that_outlives_its_input_is_named(program):
    body = "print(ask(line), end='', flush=True)\n    if 'stop' in line: sys.exit(0)\nimport time; time.sleep(60)"
    assert check_program(program(body)) == ["end_of_input: does not end at the end of its input"]


def test_a_command_that_cannot_be_started_is_a_fault():
    assert check_program("/no/such/program")[0].startswith("start: [Errno 2]")
    assert check_program("")[0] == "start: exec: names no command"
