#!/bin/bash
# Every figure of README.md on one GPU, into $1 (default: this folder). Needs the package installed, and the peers for
# the rows beside them. Steps named after the folder choose: measure.sh OUT seed64k diagnose
#
# Each step is bounded: no work is begun after its limit, and what hangs is ended some time later. `all-targets` stands for
# lines, acceptance, tuning and training, 550 seconds at most: every target beside its peer, and what stands around it.
# PROCESSES lines of the targets warm up side by side (default: one for every core) within LIMIT seconds; so many judge the
# matrix of LEVEL, LIMIT seconds a backend, and go on from there the next time. `sanitize` takes cases whose id has SELECT
# and the compute-sanitizer that SANITIZER names: racecheck of 2025.3 reports how Triton hands the parts of a
# kernel to their warps, that of 2026.4 does not.
set -u
out=${1:-$(dirname "$0")}
shift
steps=${*:-seed64k again prefill sweep quant index tiers backward nsa starts diagnose}
[ "$steps" = all-targets ] && steps="lines acceptance tuning training"
SANITIZER=${SANITIZER:-compute-sanitizer}
cores=$(env -u OMP_NUM_THREADS nproc) # which would give that number
mkdir -p "$out"
bounded() { # name, seconds until it is ended, module and arguments
    local name=$1 end=$2
    shift 2
    timeout -k 10 "$end" python3 -m "$@" >"$out/h200-$name.log" 2>&1
    echo "$name: exit $?, ${SECONDS} s so far"
}
bench() { # name, seconds until it is ended, arguments
    local name=$1 end=$2
    shift 2
    bounded "$name" "$end" attnconform.conformance.command_line bench "$@"
}
suite() { # name, seconds until it is ended, arguments: a suite of that name, with 15 s to finish what is begun
    local name=$1 end=$2
    shift 2
    bench "$name" "$end" --suite "$name" --limit $((end - 15)) --json "$out/h200-$name.json" "$@"
}
for step in $steps; do
    case $step in
    seed64k) suite seed64k 115 --peer flashinfer --trace gemma3_270m ;;
    again)
        bench again 70 --suite seed64k --limit 58 --peer flashinfer --no-counters --json "$out/h200-again.json" \
            --agrees-with "$out/h200-seed64k.json"
        ;;
    prefill) suite prefill 80 --peer flex ;;
    sweep) suite sweep 110 --plot "$out/h200-sweep.png" ;;
    quant) suite quant 40 ;;
    tiers) suite tiers 45 ;;
    starts) suite starts 240 ;;
    index) bench index 45 --suite index --json "$out/h200-index.json" ;;
    backward) suite backward 120 --peer flex ;;
    nsa) suite nsa 60 --peer fla ;;
    diagnose) bench diagnose 65 --diagnose --json "$out/h200-diagnose.json" ;;
    lines)
        bench lines $((${LIMIT:-240} + 30)) --suite targets -n "${PROCESSES:-$cores}" --limit "${LIMIT:-240}" \
            --no-counters --json "$out/h200-lines.json"
        ;;
    acceptance)
        bounded acceptance 100 attnconform.conformance.bench.acceptance --limit 80 --json "$out/h200-acceptance.json"
        ;;
    tuning) suite backward-tuning 120 -n "${PROCESSES:-$cores}" ;;
    training) suite training 60 ;;
    targets) suite targets 150 --no-counters ;;
    matrix) # the common cases and the kernels' own, by each way to plan and run them
        for backend in triton triton-hopper triton-device-plan; do
            timeout "${LIMIT:-300}" python3 -m attnconform.conformance.command_line run -b "$backend" --device cuda \
                --level "${LEVEL:-L1}" -n "${PROCESSES:-$cores}" --resume --out "$out/matrix-$backend"
        done >"$out/h200-matrix.log" 2>&1
        ;;
    sanitize) # cases of the matrix, the kernels of Hopper by their own tests, and controls, side by side
        watch() { # tool, program
            local tool=$1
            shift
            echo "== $SANITIZER --tool $tool $*"
            PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "${LIMIT:-300}" "$SANITIZER" --tool "$tool" --print-limit 8 \
                python3 "$@" 2>&1
        }
        for way in warp group exchange; do
            for arrivals in once each; do
                watch racecheck tests/kernels/hand_over.py $way $arrivals >"$out/sanitizer-control-$way-$arrivals.log" &
            done
        done
        for tool in memcheck racecheck; do
            watch $tool tests/kernels/run_once.py --select "${SELECT:-L1.}" --seconds 170 >"$out/sanitizer-$tool-L1.log" &
            for tests in tests/kernels/sparse_attention/test_hopper{,_union,_backward,_backward_rows,_backward_union}.py; do
                watch $tool -m pytest -q -p no:cacheprovider "$tests" -k "ragged or hold_anything or sinks" \
                    >"$out/sanitizer-$tool-$(basename "$tests").log" &
            done
        done
        wait
        cat "$out"/sanitizer-*.log >"$out/h200-sanitizer.log" && rm "$out"/sanitizer-*.log
        ;;
    *) echo "no step $step" >&2 && exit 2 ;;
    esac
done
