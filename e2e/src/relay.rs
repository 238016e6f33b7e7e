//! A relay between a process and what it connects to, on loopback: it passes everything on until it is cut.
//!
//! While it is cut, connections that are open pass nothing on and stay open, and new ones are accepted and left alone: what a
//! network does that loses every packet.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// A read that has nothing to do looks so often whether it is to end.
const LOOK_EVERY: Duration = Duration::from_millis(100);

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

fn pass_on(mut from: TcpStream, mut to: TcpStream, gate: &Gate) {
    from.set_read_timeout(Some(LOOK_EVERY)).expect("sockets take timeouts");
    // What is small is passed on at once: a relay must not add delays of its own.
    to.set_nodelay(true).expect("sockets take options");
    let mut buffer = vec![0; 64 << 10];
    while !gate.is_over() {
        let read = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
            Err(_) => break,
        };
        gate.wait();
        if to.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    // The other side may be gone already.
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}
