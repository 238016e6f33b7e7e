//! All system calls of the TCP transport: sockets, sends, receives, waits.
//!
//! User space never copies plain payload: a send gathers frame headers and spans ([`Gather`]). With TLS, it copies them
//! into records: shared memory may change while it is encrypted. No call blocks (`MSG_DONTWAIT`): callers wait in
//! [`wait`], so that every wait has a limit, such as a stall timeout or a deadline.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use reprise_buffers::Gather;
use reprise_identity::records::{RecordError, SEALED_BYTES_MAX, Sealer};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, Shutdown, SocketFlags, SocketType, sockopt};

/// Number of records that are encrypted for one system call: 256 KiB, which stay in the second-level cache.
const RECORDS_PER_SEND: usize = 16;

/// Options of a connection's socket.
#[derive(Clone, Debug)]
pub(crate) struct SocketOptions {
    /// Bytes for SO_SNDBUF and SO_RCVBUF; `None` uses the kernel's automatic tuning.
    pub(crate) buffer_bytes: Option<usize>,
    /// Congestion control by name; `None` uses the system's default.
    pub(crate) congestion: Option<String>,
    /// A send fails if the socket accepts nothing for this time; sent data that is not acknowledged for as
    /// long ends the connection.
    pub(crate) stall_timeout: Duration,
}

/// A connected (or connecting) TCP socket.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    stall_timeout: Duration,
    /// Set after the handshake of TLS. Only one thread at a time sends.
    encryption: OnceLock<Mutex<Encryption>>,
}

/// Encryption of what a socket sends.
#[derive(Debug)]
struct Encryption {
    sealer: Sealer,
    /// Encrypted records; `start..end` were not sent.
    records: Box<[u8]>,
    start: usize,
    end: usize,
}

/// A send that is not complete. One that is given up leaves a part of a frame or record on the connection, which must
/// end then.
pub(crate) struct PendingSend<'a> {
    gather: Gather<'a>,
    /// Time at which the socket last accepted a part, or at which the send was created.
    progress: Instant,
}

/// Wakes a thread that waits in [`wait`].
#[derive(Debug)]
pub(crate) struct Wake {
    fd: OwnedFd,
}

/// Socket state that [`wait`] waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Readiness {
    Readable,
    Writable,
}

/// Reason for which a [`wait`] returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ready {
    pub(crate) socket: bool,
    pub(crate) woken: bool,
}

/// Progress of a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendProgress {
    /// The socket has accepted all bytes.
    All,
    /// The time limit has passed; call again to continue.
    NotYet,
}

impl<'a> PendingSend<'a> {
    pub(crate) fn new(gather: Gather<'a>) -> PendingSend<'a> {
        PendingSend { gather, progress: Instant::now() }
    }
}

impl Encryption {
    fn new(sealer: Sealer) -> Encryption {
        let records = vec![0; RECORDS_PER_SEND * SEALED_BYTES_MAX].into_boxed_slice();
        Encryption { sealer, records, start: 0, end: 0 }
    }

    /// Encrypts the next records of a send, unless some wait to be sent. The bytes are copied once, to where they are
    /// encrypted.
    fn encrypt(&mut self, gather: &mut Gather<'_>) -> Result<(), RecordError> {
        if self.start < self.end {
            return Ok(());
        }
        (self.start, self.end) = (0, 0);
        while !gather.is_sent() && self.records.len() - self.end >= SEALED_BYTES_MAX {
            let into = &mut self.records[self.end..];
            self.end += self.sealer.seal(into, |plain| gather.copy_out(plain))?;
        }
        Ok(())
    }

    /// Sends the next bytes of a send, encrypted. Returns whether there were any.
    fn send(&mut self, gather: &mut Gather<'_>, socket: BorrowedFd<'_>) -> io::Result<bool> {
        self.encrypt(gather).map_err(io::Error::other)?;
        if self.start == self.end {
            return Ok(false);
        }
        let mut records = Gather::with_capacity(1);
        records.bytes(&self.records[self.start..self.end]);
        self.start += records.send(socket)?;
        Ok(true)
    }
}

impl Socket {
    fn new(fd: OwnedFd, options: &SocketOptions) -> Socket {
        Socket { fd, stall_timeout: options.stall_timeout, encryption: OnceLock::new() }
    }

    /// Encrypts everything that is sent from now on. Panics if it is encrypted already.
    pub(crate) fn encrypt(&self, sealer: Sealer) {
        let set = self.encryption.set(Mutex::new(Encryption::new(sealer)));
        assert!(set.is_ok(), "a connection has one handshake");
    }

    /// Begins to connect. The socket becomes writable when the result is known ([`Socket::finish_connect`]).
    pub(crate) fn connect(address: &SocketAddr, options: &SocketOptions) -> io::Result<Socket> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        let socket = Socket::new(fd, options);
        socket.set_options(options)?;
        match rustix::net::connect(&socket.fd, address) {
            Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the result of [`Socket::connect`] once the socket is writable.
    pub(crate) fn finish_connect(&self) -> io::Result<()> {
        Ok(sockopt::socket_error(&self.fd)??)
    }

    /// Configures an accepted connection.
    pub(crate) fn accepted(stream: std::net::TcpStream, options: &SocketOptions) -> io::Result<Socket> {
        let socket = Socket::new(OwnedFd::from(stream), options);
        socket.set_options(options)?;
        Ok(socket)
    }

    /// Receives the available bytes, with TLS those of records; `WouldBlock` without any, 0 at the end of the stream.
    pub(crate) fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        let (received, _) = rustix::net::recv(&self.fd, into, RecvFlags::DONTWAIT)?;
        Ok(received)
    }

    /// Sends all bytes. Waits while the socket is full; `TimedOut` when it accepts nothing for the stall
    /// timeout.
    pub(crate) fn send_all(&self, bytes: &[u8]) -> io::Result<()> {
        let mut gather = Gather::with_capacity(1);
        gather.bytes(bytes);
        let mut sending = PendingSend::new(gather);
        while self.send(&mut sending, None)? == SendProgress::NotYet {}
        Ok(())
    }

    /// Sends until an instant. `TimedOut` when the socket accepts nothing for the stall timeout.
    pub(crate) fn send(
        &self,
        sending: &mut PendingSend<'_>,
        until: Option<Instant>,
    ) -> io::Result<SendProgress> {
        loop {
            match self.send_once(&mut sending.gather) {
                Ok(false) => return Ok(SendProgress::All),
                Ok(true) => sending.progress = Instant::now(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let now = Instant::now();
                    let stalled = sending.progress + self.stall_timeout;
                    if stalled <= now {
                        return Err(io::Error::new(io::ErrorKind::TimedOut, "the peer accepts no data"));
                    }
                    if until.is_some_and(|until| until <= now) {
                        return Ok(SendProgress::NotYet);
                    }
                    let next = until.map_or(stalled, |until| until.min(stalled));
                    wait(Some((self, Readiness::Writable)), None, Some(next - now))?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends the next bytes. Returns whether there were any.
    fn send_once(&self, gather: &mut Gather<'_>) -> io::Result<bool> {
        match self.encryption.get() {
            Some(encryption) => {
                let mut encryption = encryption.lock().unwrap_or_else(PoisonError::into_inner);
                encryption.send(gather, self.fd.as_fd())
            }
            None if gather.is_sent() => Ok(false),
            None => gather.send(self.fd.as_fd()).map(|_| true),
        }
    }

    /// Ends both directions: threads that wait on the socket return.
    pub(crate) fn shutdown(&self) {
        // Fails when the connection has ended already, which has the same effect.
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }

    fn set_options(&self, options: &SocketOptions) -> io::Result<()> {
        sockopt::set_tcp_nodelay(&self.fd, true)?;
        let stall_ms = u32::try_from(options.stall_timeout.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(&self.fd, stall_ms)?;
        if let Some(bytes) = options.buffer_bytes {
            sockopt::set_socket_send_buffer_size(&self.fd, bytes)?;
            sockopt::set_socket_recv_buffer_size(&self.fd, bytes)?;
        }
        if let Some(name) = &options.congestion {
            set_congestion(self.fd.as_fd(), name)?;
        }
        Ok(())
    }
}

impl Wake {
    pub(crate) fn new() -> io::Result<Wake> {
        Ok(Wake { fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)? })
    }

    /// Ends the current or next [`wait`].
    pub(crate) fn wake(&self) {
        // Fails only when the counter is full, and then the descriptor is readable anyway (eventfd(2)).
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    fn reset(&self) {
        // Fails when there was no wake, which has the same effect.
        let _ = rustix::io::read(&self.fd, &mut [0; 8]);
    }
}

/// Sets the congestion control of a socket by name.
pub(crate) fn set_congestion(socket: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    Ok(sockopt::set_tcp_congestion(socket, name)?)
}

/// Waits until `socket` is ready, `wake` was called, or `timeout` (`None`: no limit) has passed.
pub(crate) fn wait(
    socket: Option<(&Socket, Readiness)>,
    wake: Option<&Wake>,
    timeout: Option<Duration>,
) -> io::Result<Ready> {
    let socket = socket.map(|(socket, readiness)| {
        let events = match readiness {
            Readiness::Readable => PollFlags::IN,
            Readiness::Writable => PollFlags::OUT,
        };
        PollFd::from_borrowed_fd(socket.fd.as_fd(), events)
    });
    wait_for(socket, wake, timeout)
}

/// Waits until a connection can be accepted on `listener` or `wake` was called.
pub(crate) fn wait_accept(listener: &std::net::TcpListener, wake: &Wake) -> io::Result<Ready> {
    wait_for(Some(PollFd::new(listener, PollFlags::IN)), Some(wake), None)
}

fn wait_for<'a>(
    socket: Option<PollFd<'a>>,
    wake: Option<&'a Wake>,
    timeout: Option<Duration>,
) -> io::Result<Ready> {
    let waking = wake.map(|wake| PollFd::new(&wake.fd, PollFlags::IN));
    let ready = match (socket, waking) {
        (Some(socket), Some(waking)) => {
            let [socket, woken] = poll_all([socket, waking], timeout)?;
            Ready { socket, woken }
        }
        (Some(socket), None) => Ready { socket: poll_all([socket], timeout)?[0], woken: false },
        (None, Some(waking)) => Ready { socket: false, woken: poll_all([waking], timeout)?[0] },
        (None, None) => unreachable!("a wait has a socket or a wake"),
    };
    if let (true, Some(wake)) = (ready.woken, wake) {
        wake.reset();
    }
    Ok(ready)
}

/// Calls poll(2); returns which descriptors are ready. Errors and hang-ups count as ready, so that the next
/// call reports them. No descriptor is ready after a timeout or a signal.
fn poll_all<const COUNT: usize>(
    mut polled: [PollFd<'_>; COUNT],
    timeout: Option<Duration>,
) -> io::Result<[bool; COUNT]> {
    let timeout = timeout.map(|timeout| Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(timeout.subsec_nanos()),
    });
    match poll(&mut polled, timeout.as_ref()) {
        Err(Errno::INTR) => Ok([false; COUNT]),
        Err(error) => Err(error.into()),
        Ok(_) => Ok(polled.map(|polled| !polled.revents().is_empty())),
    }
}
