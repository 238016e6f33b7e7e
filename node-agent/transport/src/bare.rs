//! Benchmark baseline of the transport: one TCP stream over loopback with one writer and one reader. The same
//! work as `iperf3 -l 1M` with one stream.
//!
//! Both sides reuse one buffer, so it stays in the cache: a transport that moves real data between two arenas
//! cannot quite reach this rate.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::tcp::{Congestion, name_congestion};

/// Size of one write and of one read in bytes, as in `iperf3 -l 1M`.
pub const WRITE_BYTES: usize = 1 << 20;

/// Number of bytes before the measurement, in which connection and threads warm up.
const WARM_UP_BYTES: u64 = 64 << 20;

/// Result of one run of the loop.
#[derive(Clone, Copy, Debug)]
pub struct StreamRun {
    /// Number of received bytes.
    pub bytes: u64,
    /// From the first read after the warm-up to the last one.
    pub elapsed: Duration,
}

impl StreamRun {
    /// Returns the rate in bytes per second.
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_secs_f64()
    }
}

/// Sends `bytes` bytes (rounded up to whole writes) from a thread to this one over loopback, after a warm-up.
///
/// # Errors
/// Errors of the sockets, for example a congestion control that is not available.
pub fn stream_loop(bytes: u64, congestion: &Congestion) -> io::Result<StreamRun> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    let writes = (WARM_UP_BYTES + bytes).div_ceil(WRITE_BYTES as u64);
    let mut sending = TcpStream::connect(address)?;
    name_congestion(&sending, congestion)?;
    sending.set_nodelay(true)?;
    let (mut receiving, _) = listener.accept()?;
    let writer = std::thread::Builder::new().name("bare-write".into()).spawn(move || {
        let buffer = vec![0x5a; WRITE_BYTES];
        (0..writes).try_for_each(|_| sending.write_all(&buffer))
    })?;
    let mut buffer = vec![0; WRITE_BYTES];
    let (mut received, mut warm) = (0, None);
    loop {
        match receiving.read(&mut buffer)? {
            0 => break,
            bytes => received += bytes as u64,
        }
        if received >= WARM_UP_BYTES && warm.is_none() {
            warm = Some((received, Instant::now()));
        }
    }
    let (before, started) = warm.ok_or_else(|| io::Error::other("the stream ended during the warm-up"))?;
    let elapsed = started.elapsed();
    writer.join().map_err(|_| io::Error::other("the writing thread panicked"))??;
    Ok(StreamRun { bytes: received - before, elapsed })
}
