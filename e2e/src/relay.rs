//! A TCP relay on loopback between a process and its server: forwards everything, at once or delayed, until
//! it is cut.
//!
//! While it is cut, open connections stay open without data, and new ones are accepted and left idle: like a
//! network that loses every packet.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Read timeout, after which a reading thread checks whether the relay has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum number of queued chunks of up to 64 KiB in one direction of a connection.
const CHUNKS_MAX: usize = 64;

/// A TCP relay. When it is dropped, it forwards nothing further and its threads end.
#[derive(Debug)]
pub struct Relay {
    address: String,
    state: Arc<RelayState>,
}

#[derive(Debug, Default)]
struct RelayState {
    cut: Mutex<bool>,
    healed: Condvar,
    /// Delay of all data in milliseconds.
    delay_ms: AtomicU64,
    is_over: AtomicBool,
}

impl Relay {
    /// Starts a relay to an address.
    ///
    /// # Panics
    /// If no port is free.
    pub fn to(target: &str) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound").to_string();
        let state = Arc::new(RelayState::default());
        let (target, shared) = (target.to_owned(), state.clone());
        std::thread::spawn(move || {
            for incoming in listener.incoming().flatten() {
                if shared.is_over() {
                    return;
                }
                shared.wait();
                // If the server is down, the connection is closed, as the server's port would do.
                let Ok(outgoing) = TcpStream::connect(&target) else { continue };
                let pairs = [(&incoming, &outgoing), (&outgoing, &incoming)];
                for (from, to) in pairs {
                    let (from, to) = (from.try_clone().expect("a socket"), to.try_clone().expect("a socket"));
                    let state = shared.clone();
                    std::thread::spawn(move || forward(from, to, &state));
                }
            }
        });
        Relay { address, state }
    }

    /// Returns `host:port` to connect to.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Stops forwarding until [`Relay::heal`].
    pub fn cut(&self) {
        *self.state.cut.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }

    /// Delays all data by `time` from now on.
    pub fn delay(&self, time: Duration) {
        let millis = u64::try_from(time.as_millis()).expect("the delay is a few seconds");
        self.state.delay_ms.store(millis, Ordering::Relaxed);
    }

    /// Continues forwarding, beginning with the held data.
    pub fn heal(&self) {
        *self.state.cut.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.state.healed.notify_all();
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::Relaxed);
        self.heal();
        // Wakes the accepting thread. Fails if that thread has ended, which is fine.
        let _ = TcpStream::connect(&self.address);
    }
}

impl RelayState {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Blocks while the relay is cut.
    fn wait(&self) {
        let cut = self.cut.lock().unwrap_or_else(PoisonError::into_inner);
        let healed = self.healed.wait_while(cut, |cut| *cut);
        drop(healed.unwrap_or_else(PoisonError::into_inner));
    }
}

/// Forwards chunks in order. Each has its own due time, so the delays of chunks do not add up.
fn forward(mut from: TcpStream, to: TcpStream, state: &Arc<RelayState>) {
    let (chunks, queue) = sync_channel(CHUNKS_MAX);
    let of_writer = state.clone();
    std::thread::spawn(move || write_chunks(to, &queue, &of_writer));
    from.set_read_timeout(Some(POLL_INTERVAL)).expect("a socket has timeouts");
    let mut buffer = vec![0; 64 << 10];
    while !state.is_over() {
        let read = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
            Err(_) => break,
        };
        let due = Instant::now() + Duration::from_millis(state.delay_ms.load(Ordering::Relaxed));
        if chunks.send((due, buffer[..read].to_vec())).is_err() {
            break;
        }
    }
    // Fails if the other side has closed the connection, which is fine.
    let _ = from.shutdown(Shutdown::Both);
}

/// Writes chunks when they are due, until the queue ends or the receiver is gone.
fn write_chunks(mut to: TcpStream, chunks: &Receiver<(Instant, Vec<u8>)>, state: &RelayState) {
    // Without Nagle's algorithm, which would delay small chunks.
    to.set_nodelay(true).expect("a socket has options");
    for (due, chunk) in chunks {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        state.wait();
        if to.write_all(&chunk).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}
