"""Existence queries to a Mooncake master, timed individually.

Arguments: the master's address and the number of keys to store. Each line of standard input has the keys per call and
the number of calls; the answer is a line of JSON with the median in microseconds. Ends at the end of standard input.
"""

import json
import statistics
import sys
import time

from mooncake.store import MooncakeDistributedStore

SEGMENT_BYTES = 64 << 20
BUFFER_BYTES = 16 << 20
VALUE = b"x" * 64


def send(**answer):
    print(json.dumps(answer), flush=True)


def main():
    address, count = sys.argv[1], int(sys.argv[2])
    store = MooncakeDistributedStore()
    status = store.setup("127.0.0.1", "P2PHANDSHAKE", SEGMENT_BYTES, BUFFER_BYTES, "tcp", "", address)
    if status != 0:
        sys.exit(f"the setup of the store failed with status {status}")
    keys = [f"{number:032x}" for number in range(count)]
    for key in keys:
        if store.put(key, VALUE) != 0:
            sys.exit("the master did not store a key")
    send(ready=True)
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
                sys.exit(f"the master has {found} of {size} keys")
        send(median_us=statistics.median(microseconds))


main()
