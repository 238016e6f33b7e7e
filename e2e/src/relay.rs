//! A relay between a process and what it connects to, on loopback: it passes everything on, at once or late, until it is cut.
//!
//! While it is cut, connections that are open pass nothing on and stay open, and new ones are accepted and left alone: what a
//! network does that loses every packet.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A read that has nothing to do looks so often whether it is to end.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Pieces of up to 64 KiB that wait to be passed on in one direction of a connection.
const PIECES_MAX: usize = 64;

/// A relay; dropped, it passes nothing on any more and its threads end.
#[derive(Debug)]
pub struct Relay {
    address: String,
    gate: Arc<Gate>,
}

#[derive(Debug, Default)]
struct Gate {
    cut: Mutex<bool>,
    mended: Condvar,
    /// Milliseconds by which everything is late.
    delay_ms: AtomicU64,
    over: AtomicBool,
}

impl Relay {
    /// A relay to an address.
    ///
    /// # Panics
    /// When there is no port.
    pub fn to(target: &str) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound").to_string();
        let gate = Arc::new(Gate::default());
        let (target, of_thread) = (target.to_owned(), gate.clone());
        std::thread::spawn(move || {
            for incoming in listener.incoming().flatten() {
                if of_thread.is_over() {
                    return;
                }
                of_thread.wait();
                // Whoever is behind it may be away: then the connection is closed, as its port would do.
                let Ok(outgoing) = TcpStream::connect(&target) else { continue };
                let pairs = [(&incoming, &outgoing), (&outgoing, &incoming)];
                for (from, to) in pairs {
                    let (from, to) = (from.try_clone().expect("a socket"), to.try_clone().expect("a socket"));
                    let gate = of_thread.clone();
                    std::thread::spawn(move || pass_on(from, to, &gate));
                }
            }
        });
        Relay { address, gate }
    }

    /// `host:port` to connect to.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Passes nothing on from now on.
    pub fn cut(&self) {
        *self.gate.cut.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }

    /// Passes everything on so much later from now on.
    pub fn delay(&self, time: Duration) {
        let millis = u64::try_from(time.as_millis()).expect("delays are seconds");
        self.gate.delay_ms.store(millis, Ordering::Relaxed);
    }

    /// Passes everything on again, what has waited first.
    pub fn mend(&self) {
        *self.gate.cut.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.gate.mended.notify_all();
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.gate.over.store(true, Ordering::Relaxed);
        self.mend();
        // Wakes the thread that accepts; nobody there any more is as good.
        let _ = TcpStream::connect(&self.address);
    }
}

impl Gate {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Waits while the relay is cut.
    fn wait(&self) {
        let cut = self.cut.lock().unwrap_or_else(PoisonError::into_inner);
        let mended = self.mended.wait_while(cut, |cut| *cut);
        drop(mended.unwrap_or_else(PoisonError::into_inner));
    }
}

/// Passes on in order, each piece as much later as is due when it comes: pieces do not wait for each other.
fn pass_on(mut from: TcpStream, to: TcpStream, gate: &Arc<Gate>) {
    let (pieces, queue) = sync_channel(PIECES_MAX);
    let of_writer = gate.clone();
    std::thread::spawn(move || write_on(to, &queue, &of_writer));
    from.set_read_timeout(Some(LOOK_EVERY)).expect("sockets take timeouts");
    let mut buffer = vec![0; 64 << 10];
    while !gate.is_over() {
        let read = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
            Err(_) => break,
        };
        let due = Instant::now() + Duration::from_millis(gate.delay_ms.load(Ordering::Relaxed));
        if pieces.send((due, buffer[..read].to_vec())).is_err() {
            break;
        }
    }
    // The other side may be gone already.
    let _ = from.shutdown(Shutdown::Both);
}

/// Writes pieces when they are due, until there are no more or nobody reads.
fn write_on(mut to: TcpStream, pieces: &Receiver<(Instant, Vec<u8>)>, gate: &Gate) {
    // What is small is passed on at once: a relay must not add delays of its own.
    to.set_nodelay(true).expect("sockets take options");
    for (due, piece) in pieces {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        gate.wait();
        if to.write_all(&piece).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}
