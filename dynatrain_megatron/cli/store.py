"""Run the store that the processes of an elastic job meet at, in a process of its own.

A job's own store ends with the process that holds it (rank 0, or torchrun on the first node, 300 s
after its workers). A job that shall outlive these is given this one: dynatrain store prints the
address to pass on, HOST:PORT, and ends on SIGTERM or Ctrl-C. It holds a few kilobytes, has no
password, and is for the job's own network only.
"""

import argparse
import json
import threading

from dynatrain_megatron.elastic.store import StoreServer

SUMMARY = "run a job's store in a process of its own"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatrain store`."""
    parser.add_argument(
        "--host",
        default="0.0.0.0",
        help="this machine's name or address to listen on (default: all it has)",
    )
    parser.add_argument(
        "--port", type=_port, default=0, help="port to listen on (default: one that is free)"
    )
    parser.add_argument("--json", action="store_true", help="print the address as JSON")


def run(args: argparse.Namespace) -> int:
    """Serve until told to end."""
    server = StoreServer(args.host, args.port)
    address = str(server.address)
    print(json.dumps({"address": address}) if args.json else address, flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:  # SIGTERM too: it is how a store is meant to end
        return 0
    return 1


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)
