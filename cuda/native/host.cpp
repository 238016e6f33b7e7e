// The host build: functions of the native sources that Rust calls on machines without a GPU, and tests everywhere.
#include "platform.h"

extern "C" void reprise_ring_doorbell(uint32_t* doorbell, uint32_t value) { reprise::ring_doorbell(doorbell, value); }
