//! Every system call of the TCP transport: sockets, sends, receives, waiting.
//!
//! Data is never copied by us: a send gathers frame headers and spans ([`Gather`]). No call blocks (`MSG_DONTWAIT`):
//! whoever has to wait does so in [`wait`], so that every wait has an end, be it a stall timeout or somebody's deadline.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use reprise_buffers::Gather;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, Shutdown, SocketFlags, SocketType, sockopt};

/// Options of a connection's socket.
#[derive(Clone, Debug)]
pub(crate) struct SocketOptions {
    /// Bytes for SO_SNDBUF and SO_RCVBUF; `None` leaves them to the kernel's automatic tuning.
    pub(crate) buffer_bytes: Option<usize>,
    /// Congestion control by name; `None` leaves the system's.
    pub(crate) congestion: Option<String>,
    /// A send of which the socket takes nothing fails after this time; sent data that is not acknowledged for so
    /// long ends the connection.
    pub(crate) stall_timeout: Duration,
}

/// A connected (or connecting) TCP socket.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    stall_timeout: Duration,
}

/// Something on its way into a socket.
pub(crate) struct Sending<'a> {
    gather: Gather<'a>,
    /// When the socket last took something of it, or when it was put together.
    progress: Instant,
}

/// Wakes a thread that waits in [`wait`].
#[derive(Debug)]
pub(crate) struct Wake {
    fd: OwnedFd,
}

/// What [`wait`] waits for on its socket.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Readiness {
    Readable,
    Writable,
}

/// What ended a [`wait`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ready {
    pub(crate) socket: bool,
    pub(crate) woken: bool,
}

/// How far a send came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// The socket has taken everything.
    All,
    /// The time is up; call again to go on.
    NotYet,
}

impl<'a> Sending<'a> {
    pub(crate) fn new(gather: Gather<'a>) -> Sending<'a> {
        Sending { gather, progress: Instant::now() }
    }
}

impl Socket {
    /// Begins to connect; the socket becomes writable when that is decided ([`Socket::finish_connect`]).
    pub(crate) fn connect(address: &SocketAddr, options: &SocketOptions) -> io::Result<Socket> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        let socket = Socket { fd, stall_timeout: options.stall_timeout };
        socket.set_options(options)?;
        match rustix::net::connect(&socket.fd, address) {
            Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
            Err(error) => Err(error.into()),
        }
    }

    /// The outcome of [`Socket::connect`] once the socket is writable.
    pub(crate) fn finish_connect(&self) -> io::Result<()> {
        Ok(sockopt::socket_error(&self.fd)??)
    }

    /// Takes over an accepted connection.
    pub(crate) fn accepted(stream: std::net::TcpStream, options: &SocketOptions) -> io::Result<Socket> {
        let socket = Socket { fd: OwnedFd::from(stream), stall_timeout: options.stall_timeout };
        socket.set_options(options)?;
        Ok(socket)
    }

    /// Receives what is there; `WouldBlock` when nothing is, 0 at the end of the stream.
    pub(crate) fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        let (received, _) = rustix::net::recv(&self.fd, into, RecvFlags::DONTWAIT)?;
        Ok(received)
    }

    /// Sends bytes, all of them. Waits while the socket is full; `TimedOut` when it took nothing for the stall timeout.
    pub(crate) fn send_all(&self, bytes: &[u8]) -> io::Result<()> {
        let mut gather = Gather::with_capacity(1);
        gather.bytes(bytes);
        let mut sending = Sending::new(gather);
        while self.send(&mut sending, None)? == Sent::NotYet {}
        Ok(())
    }

    /// Sends what the socket takes up to an instant. `TimedOut` when it took nothing for the stall timeout.
    pub(crate) fn send(&self, sending: &mut Sending<'_>, until: Option<Instant>) -> io::Result<Sent> {
        while !sending.gather.is_sent() {
            match sending.gather.send(self.fd.as_fd()) {
                Ok(_) => sending.progress = Instant::now(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let now = Instant::now();
                    let stalled = sending.progress + self.stall_timeout;
                    if stalled <= now {
                        return Err(io::Error::new(io::ErrorKind::TimedOut, "the peer takes no data"));
                    }
                    if until.is_some_and(|until| until <= now) {
                        return Ok(Sent::NotYet);
                    }
                    let next = until.map_or(stalled, |until| until.min(stalled));
                    wait(Some((self, Readiness::Writable)), None, Some(next - now))?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Sent::All)
    }

    /// Ends both directions: threads that wait on the socket return.
    pub(crate) fn shutdown(&self) {
        // It fails when the connection is gone already, which is as well.
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
        // It fails only when the counter is full, and then the descriptor is readable anyway (eventfd(2)).
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    fn reset(&self) {
        // It fails when nobody woke, which is as well.
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
        (None, None) => unreachable!("somebody waits for something"),
    };
    if let (true, Some(wake)) = (ready.woken, wake) {
        wake.reset();
    }
    Ok(ready)
}

/// poll(2): which of the descriptors are ready; errors and hang-ups count as ready, so that the next call reports
/// them. None when the time is up or a signal came.
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
