//! Abusive clients: connections that are idle, and connections that send garbage.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::process::LaunchOptions;
use crate::wait::PATIENCE;

/// Invalid in every protocol of Reprise, but complete enough that no server waits for more.
const GARBAGE: [u8; 256] = [0xff; 256];

/// Raises this process' soft limit on open files to the hard one, for thousands of connections.
///
/// # Panics
/// If the system refuses.
pub fn raise_own_limit() {
    let hard = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: hard, maximum: hard }).expect("a soft limit can be raised");
}

/// Returns launch options that set these limits on open files.
pub fn under_limits(soft: u64, hard: u64) -> LaunchOptions {
    let line = format!("ulimit -S -n {soft} && ulimit -H -n {hard} && exec \"$@\"");
    LaunchOptions {
        launcher: ["sh", "-c", &line, "sh"].map(str::to_owned).to_vec(),
        ..LaunchOptions::default()
    }
}

/// Opens TCP connections that send nothing.
///
/// # Panics
/// If the process does not listen.
pub fn idle(address: &str, count: usize) -> Vec<TcpStream> {
    (0..count).map(|_| TcpStream::connect(address).expect("the process listens")).collect()
}

/// Opens connections to a unix socket that send nothing.
///
/// # Panics
/// If the process does not listen.
pub fn idle_at(socket: &Path, count: usize) -> Vec<UnixStream> {
    (0..count).map(|_| UnixStream::connect(socket).expect("the process listens")).collect()
}

/// Sends garbage on `count` connections in sequence, and waits until the process closes each.
///
/// # Panics
/// If the process does not listen, or keeps a connection open.
pub fn garbage(address: &str, count: usize) {
    for _ in 0..count {
        let stream = TcpStream::connect(address).expect("the process listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a bound on reads");
        send_until_closed(stream);
    }
}

/// Sends garbage on `count` connections to a unix socket, and waits until the process closes each.
///
/// # Panics
/// If the process does not listen, or keeps a connection open.
pub fn garbage_at(socket: &Path, count: usize) {
    for _ in 0..count {
        let stream = UnixStream::connect(socket).expect("the process listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a bound on reads");
        send_until_closed(stream);
    }
}

fn send_until_closed(mut stream: impl Read + Write) {
    // Fails if the process closes the connection before it has read everything.
    let _ = stream.write_all(&GARBAGE);
    let mut answer = [0; 1024];
    loop {
        match stream.read(&mut answer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                panic!("a connection with garbage stays open for {PATIENCE:?}");
            }
            // Reset, because garbage was unread.
            Err(_) => return,
        }
    }
}
