#!/usr/bin/env bash
awk '{ sum += $1 } END { print sum }' numbers.txt > sum.txt
