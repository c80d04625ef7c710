#!/bin/sh
# Lists the sections of a changelog with their lines.
grep -n '^## ' "$1"
