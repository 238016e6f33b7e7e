//! Abusive clients: connections that are idle, and connections that send garbage.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpSocket;

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

/// Opens a TCP connection from an address of loopback, such as 127.0.0.2: another client than the other addresses.
///
/// # Errors
/// The process does not accept the connection.
pub fn connect_from(source: Ipv4Addr, address: &str) -> io::Result<TcpStream> {
    let address = address.parse().map_err(io::Error::other)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let stream = runtime.block_on(async {
        let socket = TcpSocket::new_v4()?;
        socket.bind((source, 0).into())?;
        socket.connect(address).await?.into_std()
    })?;
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Sends a startup probe from an address of loopback to an admin port, and keeps the connection; `None` if it is closed.
pub fn startup_probe(source: Ipv4Addr, address: &str) -> Option<TcpStream> {
    let mut stream = connect_from(source, address).ok()?;
    stream.write_all(b"GET /startz HTTP/1.1\r\nhost: a\r\n\r\n").ok()?;
    Some(stream)
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
