#!/usr/bin/env bash
# Follows Herdgate's events with the nats command-line tool: a durable consumer, one
# line for each event with sequence, type, task and id. Stopped and started again it
# tells from its file what it had received, and goes on where it was.
#
#   NATS_URL=nats://127.0.0.1:4222 ./subscriber.sh [FILE]
set -euo pipefail

stream=${STREAM:-HG_EVENTS}
subject=${SUBJECT:-hg.v1.event.>}
name=${NAME:-subscriber-shell}  # who has the same name shares the events
ack_wait=${ACK_WAIT:-10s}       # an event that is not acknowledged for so long comes again
file=${1:-$name.received}
command -v nats >/dev/null || { echo "the nats tool is missing, see https://github.com/nats-io/natscli" >&2; exit 1; }

# With max-pending 1 the events come in their order also after a crash: the next one is
# sent when the last is acknowledged.
nats consumer info "$stream" "$name" >/dev/null 2>&1 ||
    nats consumer add "$stream" "$name" --filter "$subject" --pull --deliver all --ack explicit \
        --wait "$ack_wait" --max-pending 1 --defaults >/dev/null

# tell prints a line for each event in the output of nats, and none twice. The subject
# is ….THREAD.RUN.TASK.TYPE; the task of an event of a run is _.
tell() {
    local -A told
    local line seq subject id task
    while IFS= read -r line; do
        case $line in
        '[#'*'] Received JetStream message: '*)
            seq=${line#* seq: } seq=${seq%% *} subject=${line#* subject: } subject=${subject%% *}
            ;;
        'Nats-Msg-Id: '*)
            id=${line#*: } task=${subject%.*}
            [ -n "${told[$id]:-}" ] || echo "${seq//,/} ${subject##*.} ${task##*.} $id"
            told[$id]=1
            ;;
        esac
    done
}

# nats acknowledges an event when it has written it to the file, so that a crash after
# that loses nothing.
touch "$file"
tail -n +1 -F "$file" 2>/dev/null | tell &
trap 'kill $(jobs -p) 2>/dev/null' EXIT
trap 'exit 0' INT TERM
while :; do
    # In the background, because bash sees a signal only while it waits by itself.
    nats sub --stream "$stream" --durable "$name" --ack --headers-only >>"$file" &
    wait $! || true
    echo "nats has ended; once more in a second" >&2
    sleep 1
done
