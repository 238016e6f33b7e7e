"""Existence queries of a Mooncake master, timed one by one.

Arguments: the master's address, and how many keys to put. Then each line of standard input names keys a call and calls; the
answer is a line of JSON with the median in microseconds. Ends with its standard input.
"""

import json
import statistics
import sys
import time

from mooncake.store import MooncakeDistributedStore

SEGMENT_BYTES = 64 << 20
BUFFER_BYTES = 16 << 20
VALUE = b"x" * 64


def say(**answer):
    print(json.dumps(answer), flush=True)


def main():
    address, count = sys.argv[1], int(sys.argv[2])
    store = MooncakeDistributedStore()
    status = store.setup("127.0.0.1", "P2PHANDSHAKE", SEGMENT_BYTES, BUFFER_BYTES, "tcp", "", address)
    if status != 0:
        sys.exit(f"the store's setup answered {status}")
    keys = [f"{number:032x}" for number in range(count)]
    for key in keys:
        if store.put(key, VALUE) != 0:
            sys.exit("a key was not put")
    say(ready=True)
    for line in sys.stdin:
        size, calls = map(int, line.split())
        microseconds = []
        for call in range(calls):
            first = call * size % (count - size + 1)
            wanted = keys[first : first + size]
            began = time.perf_counter_ns()
            found = store.is_exist(wanted[0]) if size == 1 else sum(store.batch_is_exist(wanted))
            microseconds.append((time.perf_counter_ns() - began) / 1000)
            if found != size:
                sys.exit(f"{found} of {size} keys are there")
        say(median_us=statistics.median(microseconds))


main()
