//! Every system call of the TCP transport: sockets, gathered sends, scattered receives, waiting.
//!
//! Data is never copied by us: a send gathers frame headers and spans. No call blocks (`MSG_DONTWAIT`): whoever has
//! to wait does so in [`wait`], so that every wait has an end, be it a stall timeout or somebody's deadline.

use std::io;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use reprise_buffers::Span;

/// Buffers of one `sendmsg` at the most. The kernel's limit is 1024 (UIO_MAXIOV).
pub(crate) const GATHER_MAX: usize = 256;

const _: () = assert!(GATHER_MAX <= libc::UIO_MAXIOV as usize);

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

/// Memory to send, in order; borrows what it names until it is sent.
pub(crate) struct Gather<'a> {
    /// What is still to be sent begins at the buffer `first`.
    buffers: Vec<libc::iovec>,
    first: usize,
    /// When the socket last took something of it, or when it was put together.
    progress: Instant,
    memory: PhantomData<&'a [u8]>,
}

/// How far a send came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// The socket has taken everything.
    All,
    /// The time is up; call again to go on.
    NotYet,
}

impl Socket {
    /// Begins to connect; the socket becomes writable when that is decided ([`Socket::finish_connect`]).
    pub(crate) fn connect(address: &SocketAddr, options: &SocketOptions) -> io::Result<Socket> {
        let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: socket(2) takes no pointers.
        let fd = checked(unsafe { libc::socket(family, kind, 0) })?;
        // SAFETY: the descriptor was just made and belongs to nobody else.
        let socket = Socket { fd: unsafe { OwnedFd::from_raw_fd(fd) }, stall_timeout: options.stall_timeout };
        socket.set_options(options)?;
        let (storage, length) = raw_address(address);
        // SAFETY: `storage` holds an address of `length` bytes and outlives the call.
        let result = checked(unsafe { libc::connect(fd, (&raw const storage).cast(), length) });
        match result {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
            _ => Ok(socket),
        }
    }

    /// The outcome of [`Socket::connect`] once the socket is writable.
    pub(crate) fn finish_connect(&self) -> io::Result<()> {
        let error = self.option(libc::SOL_SOCKET, libc::SO_ERROR)?;
        match error {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    /// Takes over an accepted connection.
    pub(crate) fn accepted(stream: std::net::TcpStream, options: &SocketOptions) -> io::Result<Socket> {
        let socket = Socket { fd: OwnedFd::from(stream), stall_timeout: options.stall_timeout };
        socket.set_options(options)?;
        Ok(socket)
    }

    /// Receives what is there; `WouldBlock` when nothing is, 0 at the end of the stream.
    pub(crate) fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        // SAFETY: `into` is writable for its length and ours alone during the call (recv(2)).
        let received = unsafe {
            libc::recv(self.fd.as_raw_fd(), into.as_mut_ptr().cast(), into.len(), libc::MSG_DONTWAIT)
        };
        transferred(received)
    }

    /// Sends everything. Waits while the socket is full; `TimedOut` when it took nothing for the stall timeout.
    pub(crate) fn send_all(&self, mut gather: Gather<'_>) -> io::Result<()> {
        while self.send(&mut gather, None)? == Sent::NotYet {}
        Ok(())
    }

    /// Sends what the socket takes up to an instant. `TimedOut` when it took nothing for the stall timeout.
    pub(crate) fn send(&self, gather: &mut Gather<'_>, until: Option<Instant>) -> io::Result<Sent> {
        while !gather.is_sent() {
            match self.send_now(gather) {
                Ok(bytes) => gather.advance(bytes),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let now = Instant::now();
                    let stalled = gather.progress + self.stall_timeout;
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

    /// One attempt to send; the bytes that the socket took.
    fn send_now(&self, gather: &mut Gather<'_>) -> io::Result<usize> {
        let rest = &mut gather.buffers[gather.first..];
        let mut message = empty_message();
        message.msg_iov = rest.as_mut_ptr();
        message.msg_iovlen = rest.len().min(GATHER_MAX);
        // SAFETY: every buffer is readable for its length: `Gather` borrows the slices and spans it names; the message
        // and the buffer list outlive the call (sendmsg(2)).
        let sent = unsafe {
            libc::sendmsg(self.fd.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
        };
        transferred(sent)
    }

    /// Ends both directions: threads that wait on the socket return.
    pub(crate) fn shutdown(&self) {
        // SAFETY: shutdown(2) takes no pointers. It fails when the connection is gone already, which is as well.
        let _ = unsafe { libc::shutdown(self.fd.as_raw_fd(), libc::SHUT_RDWR) };
    }

    fn set_options(&self, options: &SocketOptions) -> io::Result<()> {
        self.set_option(libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
        let stall_ms = i32::try_from(options.stall_timeout.as_millis()).unwrap_or(i32::MAX);
        self.set_option(libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, stall_ms)?;
        if let Some(bytes) = options.buffer_bytes {
            let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
            self.set_option(libc::SOL_SOCKET, libc::SO_SNDBUF, bytes)?;
            self.set_option(libc::SOL_SOCKET, libc::SO_RCVBUF, bytes)?;
        }
        if let Some(name) = &options.congestion {
            set_congestion(self.fd.as_fd(), name)?;
        }
        Ok(())
    }

    fn set_option(&self, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
        // SAFETY: `value` is an int and outlives the call; all options set here take an int (tcp(7), socket(7)).
        checked(unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                level,
                name,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        })?;
        Ok(())
    }

    fn option(&self, level: libc::c_int, name: libc::c_int) -> io::Result<libc::c_int> {
        let mut value: libc::c_int = 0;
        let mut length = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: `value` has room for the int that the option is, and `length` says so (getsockopt(2)).
        checked(unsafe {
            libc::getsockopt(self.fd.as_raw_fd(), level, name, (&raw mut value).cast(), &raw mut length)
        })?;
        Ok(value)
    }
}

impl Wake {
    pub(crate) fn new() -> io::Result<Wake> {
        // SAFETY: eventfd(2) takes no pointers.
        let fd = checked(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        // SAFETY: the descriptor was just made and belongs to nobody else.
        Ok(Wake { fd: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    /// Ends the current or next [`wait`].
    pub(crate) fn wake(&self) {
        let one: u64 = 1;
        // SAFETY: eight bytes are read from `one` (eventfd(2)). It fails only when the counter is full, and then
        // the descriptor is readable anyway.
        let _ = unsafe { libc::write(self.fd.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    fn reset(&self) {
        let mut count: u64 = 0;
        // SAFETY: eight bytes are written to `count` (eventfd(2)). It fails when nobody woke, which is as well.
        let _ = unsafe { libc::read(self.fd.as_raw_fd(), (&raw mut count).cast(), 8) };
    }
}

impl<'a> Gather<'a> {
    pub(crate) fn with_capacity(buffers: usize) -> Gather<'a> {
        Gather {
            buffers: Vec::with_capacity(buffers),
            first: 0,
            progress: Instant::now(),
            memory: PhantomData,
        }
    }

    pub(crate) fn bytes(&mut self, bytes: &'a [u8]) {
        self.push(bytes.as_ptr(), bytes.len());
    }

    pub(crate) fn span(&mut self, span: &'a Span) {
        self.push(span.as_ptr(), span.len());
    }

    fn push(&mut self, start: *const u8, bytes: usize) {
        if bytes > 0 {
            self.buffers.push(libc::iovec { iov_base: start.cast_mut().cast(), iov_len: bytes });
        }
    }

    fn is_sent(&self) -> bool {
        self.first == self.buffers.len()
    }

    /// The socket took the first `sent` bytes of what is left.
    fn advance(&mut self, mut sent: usize) {
        self.progress = Instant::now();
        while let Some(first) = self.buffers.get_mut(self.first) {
            if sent < first.iov_len {
                first.iov_base = first.iov_base.wrapping_byte_add(sent);
                first.iov_len -= sent;
                return;
            }
            sent -= first.iov_len;
            self.first += 1;
        }
    }
}

/// Sets the congestion control of a socket by name.
pub(crate) fn set_congestion(socket: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    // SAFETY: the name is readable for its length (tcp(7), TCP_CONGESTION).
    checked(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_CONGESTION,
            name.as_ptr().cast(),
            name.len() as libc::socklen_t,
        )
    })?;
    Ok(())
}

/// Waits until `socket` is ready, `wake` was called, or `timeout` (`None`: no limit) has passed.
pub(crate) fn wait(
    socket: Option<(&Socket, Readiness)>,
    wake: Option<&Wake>,
    timeout: Option<Duration>,
) -> io::Result<Ready> {
    let (fd, events) = match socket {
        Some((socket, Readiness::Readable)) => (socket.fd.as_raw_fd(), libc::POLLIN),
        Some((socket, Readiness::Writable)) => (socket.fd.as_raw_fd(), libc::POLLOUT),
        None => (-1, 0),
    };
    let ready =
        poll_two([(fd, events), (wake.map_or(-1, |wake| wake.fd.as_raw_fd()), libc::POLLIN)], timeout)?;
    if ready[1]
        && let Some(wake) = wake
    {
        wake.reset();
    }
    Ok(Ready { socket: ready[0], woken: ready[1] })
}

/// Waits until a connection can be accepted on `listener` or `wake` was called.
pub(crate) fn wait_accept(
    listener: &std::net::TcpListener,
    wake: &Wake,
    timeout: Option<Duration>,
) -> io::Result<Ready> {
    let ready =
        poll_two([(listener.as_raw_fd(), libc::POLLIN), (wake.fd.as_raw_fd(), libc::POLLIN)], timeout)?;
    if ready[1] {
        wake.reset();
    }
    Ok(Ready { socket: ready[0], woken: ready[1] })
}

/// poll(2) on two descriptors (-1: none); errors and hang-ups count as ready, so that the next call reports them.
fn poll_two(descriptors: [(RawFd, libc::c_short); 2], timeout: Option<Duration>) -> io::Result<[bool; 2]> {
    let mut polled = descriptors.map(|(fd, events)| libc::pollfd { fd, events, revents: 0 });
    // Rounded up: waking a moment before a deadline would mean to wait again.
    let timeout_ms = timeout
        .map_or(-1, |timeout| i32::try_from(timeout.as_millis().saturating_add(1)).unwrap_or(i32::MAX));
    // SAFETY: `polled` is an array of two pollfd and outlives the call (poll(2)).
    let result = checked(unsafe { libc::poll(polled.as_mut_ptr(), 2, timeout_ms) });
    match result {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok([false; 2]),
        Err(error) => Err(error),
        Ok(_) => Ok(polled.map(|polled| polled.revents != 0)),
    }
}

fn empty_message() -> libc::msghdr {
    // SAFETY: all fields of msghdr are integers and pointers, for which zero is valid (no name, no buffers, no
    // control data).
    unsafe { std::mem::zeroed() }
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn transferred(result: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn raw_address(address: &SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: sockaddr_storage consists of integers, for which zero is valid.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let length = match address {
        SocketAddr::V4(v4) => {
            let raw = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: sockaddr_storage is large and aligned enough for every address type (POSIX, sys/socket.h).
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(raw) };
            size_of::<libc::sockaddr_in>()
        }
        SocketAddr::V6(v6) => {
            let raw = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(raw) };
            size_of::<libc::sockaddr_in6>()
        }
    };
    (storage, length as libc::socklen_t)
}
