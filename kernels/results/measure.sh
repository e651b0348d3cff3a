#!/bin/bash
# Every figure of README.md on one GPU, into $1 (default: this folder). Needs the package installed, and the peers for
# the rows beside them. Steps named after the folder choose: measure.sh OUT seed64k diagnose
set -u
out=${1:-$(dirname "$0")}
shift
steps=${*:-seed64k again prefill diagnose sweep backward index quant nsa}
mkdir -p "$out"
attend() { # name, seconds, arguments of bench
    local name=$1 limit=$2
    shift 2
    timeout "$limit" python3 -m attnconform.conformance.command_line bench "$@" >"$out/h200-$name.log" 2>&1
    echo "$name: exit $?, ${SECONDS} s so far"
}
for step in $steps; do
    case $step in
    seed64k) attend seed64k 120 --suite seed64k --peer flashinfer --trace gemma3_270m --json "$out/h200-seed64k.json" ;;
    again) attend again 80 --suite seed64k --peer flashinfer --no-counters --agrees-with "$out/h200-seed64k.json" ;;
    prefill) attend prefill 120 --suite prefill --peer flex --json "$out/h200-prefill.json" ;;
    diagnose) attend diagnose 150 --diagnose --json "$out/h200-diagnose.json" ;;
    sweep) attend sweep 90 --suite sweep --json "$out/h200-sweep.json" --plot "$out/h200-sweep.png" ;;
    backward) attend backward 90 --suite backward --peer flex --json "$out/h200-backward.json" ;;
    index) attend index 40 --suite index --json "$out/h200-index.json" ;;
    quant) attend quant 60 --suite quant --json "$out/h200-quant.json" ;;
    nsa) attend nsa 90 --suite nsa --peer fla --json "$out/h200-nsa.json" ;;
    *) echo "no step $step" >&2 && exit 2 ;;
    esac
done
