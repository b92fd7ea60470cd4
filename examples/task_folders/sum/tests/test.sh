#!/usr/bin/env bash
# Pays half for a number, all for the right one.
mkdir -p /logs/verifier
expected=$(awk '{ sum += $1 } END { print sum }' /tests/numbers.txt)
reward=0.0
if [[ $(cat sum.txt) =~ ^[0-9]+$ ]]; then reward=0.5; fi
if [[ $(cat sum.txt) == "$expected" ]]; then reward=1.0; fi
echo "{\"reward\": $reward, \"acc\": $([[ $reward == 1.0 ]] && echo 1 || echo 0)}" > /logs/verifier/reward.json
