#!/usr/bin/env python3
"""Submits a task over HTTP and follows it to its end, with the standard library alone.

    python3 submit.py "List the files of the workspace."

A stream that breaks is taken up where it was, by Last-Event-ID. The exit code is 0 if
the task has completed.
"""

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request


def call(base, path, body=None, **headers):
    """Opens a request; the token of HERDGATE_TOKEN goes along if there is one."""
    if token := os.environ.get("HERDGATE_TOKEN"):
        headers["Authorization"] = "Bearer " + token
    if body is not None:
        body = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
    # The server writes a comment every 15 s: a minute of silence is a dead connection.
    return urllib.request.urlopen(urllib.request.Request(base + path, body, headers), timeout=60)


def server_sent(stream):
    """Yields (id, event, data) of each server-sent event."""
    fields = {}
    for line in stream:
        line = line.decode().rstrip("\r\n")
        if not line:
            if "data" in fields:
                yield fields.get("id", ""), fields.get("event", "message"), fields["data"]
            fields = {}
        elif not line.startswith(":"):  # a comment
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            fields[name] = fields["data"] + "\n" + value if name == "data" and name in fields else value


def follow(base, task):
    """Yields the task's events, each once, until it has ended."""
    last = None
    while True:
        try:
            query = urllib.parse.urlencode({"task_id": task})
            headers = {"Accept": "text/event-stream"}
            if last:
                headers["Last-Event-ID"] = last
            with call(base, "/v1/events?" + query, **headers) as stream:
                for last, kind, data in server_sent(stream):
                    yield kind, json.loads(data)
                    if kind == "subagent.end":
                        return
        except urllib.error.HTTPError as err:
            if err.code not in (429, 502, 503):
                raise
            print("submit: not now:", err, file=sys.stderr)
        except OSError as err:
            print("submit: the stream broke:", err, file=sys.stderr)
        time.sleep(1)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("prompt")
    args.add_argument("--server", default="http://127.0.0.1:8484", help="address of the HTTP API")
    args.add_argument("--type", default="general-purpose", help="sub-agent type")
    args = args.parse_args()
    try:
        with call(args.server, "/v1/tasks", {"subagent_type": args.type, "prompt": args.prompt}) as answer:
            task = json.load(answer)["task_id"]
        print("task", task)
        for kind, event in follow(args.server, task):
            print(event.get("seq", ""), kind, event.get("event_id", ""), flush=True)
        with call(args.server, "/v1/tasks/" + task) as answer:
            ended = json.load(answer)
    except urllib.error.HTTPError as err:
        # Problem details after RFC 9457: "code" is what a program may rely on.
        sys.exit(f"submit: {err}: {err.read().decode(errors='replace')}")
    except OSError as err:
        sys.exit(f"submit: {args.server}: {err}")
    print(ended["status"], ended.get("result") or ended.get("error") or "")
    return 0 if ended["status"] == "completed" else 1


if __name__ == "__main__":
    sys.exit(main())
