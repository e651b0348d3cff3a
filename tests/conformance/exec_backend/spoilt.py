"""A program that passes everything on to another one, but misbehaves where a run has a mask rule, in the way named."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def misbehave(mode, message):
    """Answers a run wrongly, or not at all."""
    ran = {"type": "ran", "id": message["id"]}
    match mode:
        case "exits":
            print("loading\nno licence left", file=sys.stderr, flush=True)
            sys.exit(7)
        case "segfaults":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hangs":
            time.sleep(3600)
        case "chatters":
            return "loading weights ..."
        case "answers-another-run":
            ran["id"] += 1
        case "answers-another-request":
            ran = {"type": "stopped"}
        case "writes-nothing":
            pass
        case "writes-half-a-file":
            Path(message["outputs"]).write_bytes(b"\x40\0\0\0\0\0\0\0{")
        case "writes-inputs":
            Path(message["outputs"]).write_bytes(Path(message["inputs"]).read_bytes())
        case "runs-out-of-memory":
            ran = {"type": "failed", "id": message["id"], "message": "workspace of 96 GiB", "out_of_memory": True}
        case "fails":
            ran = {"type": "failed", "id": message["id"], "message": "no kernel for this window"}
    return json.dumps(ran)


def is_run_with_a_mask(line):
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if message["type"] == "run" and message["problem"]["mask_rule"] else None


def main():
    mode, program = sys.argv[1:]
    inner = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    for line in sys.stdin:
        message = is_run_with_a_mask(line)
        if message is not None:
            print(misbehave(mode, message), flush=True)
            continue
        inner.stdin.write(line)
        print(inner.stdout.readline(), end="", flush=True)


if __name__ == "__main__":
    main()
