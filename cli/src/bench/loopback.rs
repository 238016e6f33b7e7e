//! Minimum time of an answer over TCP on this machine: one byte to another thread on loopback, and back.
//!
//! Every call to a server also includes two wake-ups of a waiting thread and the kernel's path between them.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

use anyhow::{Context, anyhow};

use reprise_testkit::bench::report::median;

/// Returns the median of this many round trips, in microseconds.
pub(super) fn round_trip_us(count: usize) -> anyhow::Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no free port on loopback")?;
    let address = listener.local_addr()?;
    let echo = thread::spawn(move || echo(&listener));
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let mut microseconds = Vec::with_capacity(count);
    for _ in 0..count {
        let began = Instant::now();
        stream.write_all(&[1])?;
        stream.read_exact(&mut [0])?;
        microseconds.push(began.elapsed().as_secs_f64() * 1e6);
    }
    drop(stream);
    echo.join().map_err(|_| anyhow!("the echo thread panicked"))??;
    Ok(median(microseconds))
}

/// Sends received bytes back until the other side closes the connection.
fn echo(listener: &TcpListener) -> std::io::Result<()> {
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut byte = [0];
    loop {
        match stream.read_exact(&mut byte) {
            Ok(()) => stream.write_all(&byte)?,
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_comes_back_in_some_time() {
        assert!(round_trip_us(10).expect("loopback works") > 0.0);
    }
}
