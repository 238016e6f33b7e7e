//! The check of contents that also runs on GPUs.

use reprise_cuda::ring::{BenchSettings, verify};

#[test]
fn writes_and_reads_in_other_pieces_give_the_same_bytes() {
    for (sgl, queues, entries) in [(true, 1, 2), (true, 4, 64), (false, 2, 16)] {
        let settings =
            BenchSettings { queues, entries, sgl, controller_threads: 2, ..BenchSettings::default() };
        let verified = verify(&settings, 2, 1).expect("all bytes are equal");
        assert_eq!(verified.bytes, 4 * (4 << 20), "two rounds write and read everything");
    }
}
