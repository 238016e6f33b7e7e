//! Sending shared memory over a socket: frame headers of the process and spans, gathered into one system call
//! and copied only by the kernel.
//!
//! Not included: waiting. A send takes what the socket accepts at once; callers wait where they also check
//! their deadlines. Receiving into spans: bytes are received into private memory and copied from there in the
//! pass that checksums them ([`Crc32c`](crate::Crc32c)).

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::kernel;
use crate::span::Span;

/// Maximum number of buffers for one system call. The kernel's limit is 1024 (UIO_MAXIOV).
pub const GATHER_MAX: usize = 256;

const _: () = assert!(GATHER_MAX <= libc::UIO_MAXIOV as usize);

/// Bytes of one copy of [`Gather::copy_out`]: short enough that the copied bytes stay in the cache, where they are
/// encrypted next.
const COPY_BYTES: usize = 8 << 10;

/// Memory to send, in order; borrows the memory until it is sent.
#[derive(Debug)]
pub struct Gather<'a> {
    /// The unsent part begins at the buffer `first`.
    buffers: Vec<libc::iovec>,
    first: usize,
    memory: PhantomData<&'a [u8]>,
}

impl<'a> Gather<'a> {
    /// Creates an empty list with room for `buffers` buffers.
    pub fn with_capacity(buffers: usize) -> Gather<'a> {
        Gather { buffers: Vec::with_capacity(buffers), first: 0, memory: PhantomData }
    }

    /// Appends memory of this process.
    pub fn bytes(&mut self, bytes: &'a [u8]) {
        self.push(bytes.as_ptr(), bytes.len());
    }

    /// Appends shared memory; the kernel sends its contents as of the copy.
    pub fn span(&mut self, span: &'a Span) {
        self.push(span.as_ptr(), span.len());
    }

    /// Reports whether everything was sent.
    pub fn is_sent(&self) -> bool {
        self.first == self.buffers.len()
    }

    /// Sends what a stream socket accepts without waiting, even if the socket is a blocking one. Returns the
    /// number of bytes.
    ///
    /// # Errors
    /// `WouldBlock` when the socket accepts nothing now, or another error of the socket; nothing was sent
    /// then.
    pub fn send(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let rest = &mut self.buffers[self.first..];
        // SAFETY: all fields of msghdr are integers and pointers, for which zero is valid (no name, no
        // control data).
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = rest.as_mut_ptr();
        // The type differs between glibc and musl; GATHER_MAX fits both.
        message.msg_iovlen = rest.len().min(GATHER_MAX) as _;
        // SAFETY: every buffer is readable for its length: `self` borrows the slices and spans that it names;
        // the message and the list of buffers outlive the call (sendmsg(2)).
        let sent = unsafe {
            libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
        };
        let sent = usize::try_from(sent).map_err(|_| io::Error::last_os_error())?;
        self.advance(sent);
        Ok(sent)
    }

    /// Copies the next unsent bytes to private memory, where they can be encrypted, and counts them as sent. Returns
    /// their number, which is less than `into` has only at the end.
    pub fn copy_out(&mut self, into: &mut [u8]) -> usize {
        let mut copied = 0;
        while let Some(first) = self.buffers.get(self.first)
            && copied < into.len()
        {
            let piece = first.iov_len.min(into.len() - copied).min(COPY_BYTES);
            let into = &mut into[copied..copied + piece];
            // SAFETY: the buffer is readable for its length: `self` borrows the slice or span that it names. `into` is
            // exclusively ours. The doc of `kernel` covers concurrent stores.
            unsafe { kernel::copy(first.iov_base.cast_const().cast(), into.as_mut_ptr(), piece) };
            copied += piece;
            self.advance(piece);
        }
        copied
    }

    fn push(&mut self, start: *const u8, bytes: usize) {
        if bytes > 0 {
            self.buffers.push(libc::iovec { iov_base: start.cast_mut().cast(), iov_len: bytes });
        }
    }

    /// Removes the first `sent` unsent bytes.
    fn advance(&mut self, mut sent: usize) {
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

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::PageBuffer;

    #[test]
    fn gathered_buffers_arrive_in_order_in_any_segmentation() {
        let pages = 1 << 20;
        let span = PageBuffer::new(pages).expect("memory for a test").span();
        let bytes: Vec<u8> = (0..pages).map(|index| (index % 251) as u8).collect();
        span.copy_in(&bytes).expect("writable");
        let (sender, mut receiver) = UnixStream::pair().expect("a socket pair");
        // More buffers than one call sends, of odd lengths, and empty ones.
        let pieces: Vec<Span> =
            (0..GATHER_MAX).map(|index| span.slice(index * 4000, 3999).expect("inside the buffer")).collect();
        let mut gather = Gather::with_capacity(2 * GATHER_MAX);
        let mut expected = Vec::new();
        for (index, piece) in pieces.iter().enumerate() {
            gather.bytes(b"head");
            gather.span(piece);
            gather.bytes(b"");
            expected.extend_from_slice(b"head");
            expected.extend_from_slice(&bytes[index * 4000..][..3999]);
        }
        let mut arrived = Vec::new();
        let mut buffer = vec![0; 10_007];
        while !gather.is_sent() {
            match gather.send(sender.as_fd()) {
                Ok(sent) => assert!(sent > 0),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    let read = receiver.read(&mut buffer).expect("the socket is full");
                    arrived.extend_from_slice(&buffer[..read]);
                }
            }
        }
        drop(sender);
        receiver.read_to_end(&mut arrived).expect("the rest");
        assert!(arrived == expected);
    }

    #[test]
    fn copied_bytes_are_those_that_a_send_would_send() {
        let span = PageBuffer::new(64 << 10).expect("memory for a test").span();
        let bytes: Vec<u8> = (0..span.len()).map(|index| (index % 251) as u8).collect();
        span.copy_in(&bytes).expect("writable");
        let mut gather = Gather::with_capacity(3);
        gather.bytes(b"head");
        gather.span(&span);
        gather.bytes(b"tail");
        let mut copied = Vec::new();
        let mut record = [0; 10_007];
        loop {
            match gather.copy_out(&mut record) {
                0 => break,
                count => copied.extend_from_slice(&record[..count]),
            }
            assert!(copied.len().is_multiple_of(record.len()) || gather.is_sent(), "a record is filled");
        }
        assert!(gather.is_sent());
        assert!(copied == [b"head", &bytes[..], b"tail"].concat());
    }

    #[test]
    fn a_closed_socket_is_an_error_and_not_a_signal() {
        let (sender, receiver) = UnixStream::pair().expect("a socket pair");
        drop(receiver);
        let mut gather = Gather::with_capacity(1);
        gather.bytes(b"unread");
        let error = gather.send(sender.as_fd()).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
        assert!(!gather.is_sent());
    }
}
