//! Passing descriptors over a unix socket, and the credentials of its peer. See unix(7), cmsg(3).

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::error::BufferError;
use crate::sys::check;

/// Maximum number of descriptors in one message (the kernel's limit is 253, SCM_MAX_FD).
pub const DESCRIPTORS_MAX: usize = 32;

/// Room for [`DESCRIPTORS_MAX`] descriptors and one header: CMSG_SPACE(32 × 4) = 16 + 128.
const CONTROL_BYTES: usize = 144;

// SAFETY: CMSG_SPACE is arithmetic on its argument.
const _: () = assert!(
    unsafe { libc::CMSG_SPACE((DESCRIPTORS_MAX * size_of::<RawFd>()) as u32) } as usize == CONTROL_BYTES
);

/// User id that the kernel reports for a socket without a peer (`INVALID_UID`, `cred_to_ucred` in
/// net/core/sock.c). No process has this id: user_namespaces(7) maps an unknown user to 65534.
const NO_PEER_UID: u32 = u32::MAX;

/// The process at the other end of a unix socket, as of the time of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process id; 0 when it is unknown, because the process lives in a PID namespace that this process
    /// cannot see (a separate pod without `hostPID`).
    pub pid: i32,
    /// User id of the process.
    pub uid: u32,
    /// Group id of the process.
    pub gid: u32,
}

/// A buffer for control messages, with the alignment of `cmsghdr`.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// Sends all of `bytes` (at least one) over a blocking stream socket, with the descriptors attached to the
/// first byte.
///
/// Errors: more than [`DESCRIPTORS_MAX`] descriptors, no bytes, or an error of the socket. `WouldBlock` means
/// that a send timeout has expired; a part may be sent, so close the connection.
pub fn send_with_fds(sock: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), BufferError> {
    check_message(bytes, fds)?;
    let failed = |source| BufferError::system("send on a unix socket", source);
    let mut sent = send_once(sock, bytes, fds, 0).map_err(failed)?;
    while sent < bytes.len() {
        sent += send_once(sock, &bytes[sent..], &[], 0).map_err(failed)?;
    }
    Ok(())
}

/// Sends the part of `bytes` (at least one) that a stream socket accepts without waiting, with the
/// descriptors attached to the first byte. `None`: the socket accepts nothing now, and no descriptor was
/// sent.
///
/// Errors: as for [`send_with_fds`], without timeouts.
pub fn try_send_with_fds(
    sock: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<Option<usize>, BufferError> {
    check_message(bytes, fds)?;
    match send_once(sock, bytes, fds, libc::MSG_DONTWAIT) {
        Ok(sent) => Ok(Some(sent)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(BufferError::system("send on a unix socket", error)),
    }
}

/// Checks the arguments of both ways to send.
fn check_message(bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), BufferError> {
    if fds.len() > DESCRIPTORS_MAX {
        return Err(BufferError::Invalid(format!(
            "invalid message with {} descriptors: at most {DESCRIPTORS_MAX}, use several messages",
            fds.len()
        )));
    }
    if bytes.is_empty() {
        return Err(BufferError::Invalid(
            "invalid empty message: descriptors need at least one byte".to_owned(),
        ));
    }
    Ok(())
}

/// Receives up to `buf.len()` bytes with one recvmsg(2), and appends descriptors that came with them to `fds`
/// (close-on-exec). 0 bytes: the other side has closed the socket.
///
/// Errors: descriptors did not fit (the received ones are closed), or an error of the socket. `WouldBlock`
/// means that a receive timeout has expired.
pub fn recv_with_fds(
    sock: BorrowedFd<'_>,
    buf: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> Result<usize, BufferError> {
    let mut control = Control([0; CONTROL_BYTES]);
    let mut vector = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    let mut message = message_header(&raw mut vector);
    message.msg_control = control.0.as_mut_ptr().cast();
    // The types of these lengths differ between glibc and musl.
    message.msg_controllen = CONTROL_BYTES as _;
    let received = loop {
        // SAFETY: the header names one vector over `buf` and a control buffer of the stated length, all alive
        // and exclusively ours during the call (recvmsg(2)).
        let rc = unsafe { libc::recvmsg(sock.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
        match usize::try_from(rc) {
            Ok(received) => break received,
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(BufferError::system("receive from a unix socket", error));
                }
            }
        }
    };
    // Take ownership before any check, so that rejected descriptors are closed and not leaked.
    let came = take_descriptors(&message);
    if message.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(BufferError::Descriptors(
            "too many in one message, or this process has reached its limit",
        ));
    }
    fds.extend(came);
    Ok(received)
}

/// Returns the process at the other end of a connected unix socket.
pub fn peer_credentials(sock: BorrowedFd<'_>) -> Result<PeerCredentials, BufferError> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: SO_PEERCRED stores a `ucred` of the stated length (unix(7)).
    let rc = unsafe {
        libc::getsockopt(
            sock.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    check(rc).map_err(|source| BufferError::system("read the peer credentials of a socket", source))?;
    peer_of(credentials)
        .ok_or_else(|| BufferError::Invalid("invalid socket: not connected to a process".to_owned()))
}

/// Interprets SO_PEERCRED; `None` when the socket has no peer. Process id 0 is valid: see
/// [`PeerCredentials`].
fn peer_of(credentials: libc::ucred) -> Option<PeerCredentials> {
    let libc::ucred { pid, uid, gid } = credentials;
    (uid != NO_PEER_UID).then_some(PeerCredentials { pid, uid, gid })
}

/// Calls sendmsg(2) with these additional flags; returns the number of accepted bytes.
fn send_once(
    sock: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: libc::c_int,
) -> io::Result<usize> {
    let mut control = Control([0; CONTROL_BYTES]);
    let vector = IoSlice::new(bytes);
    // IoSlice is promised to have the layout of an iovec; sendmsg only reads through it.
    let mut message = message_header((&raw const vector).cast_mut().cast());
    if !fds.is_empty() {
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = put_descriptors(&mut control, fds) as _;
    }
    loop {
        // SAFETY: the header names one vector over `bytes` and the filled part of `control`, alive during the
        // call; the descriptors are open as long as `fds` borrows them (sendmsg(2)). No SIGPIPE.
        let rc = unsafe { libc::sendmsg(sock.as_raw_fd(), &raw const message, flags | libc::MSG_NOSIGNAL) };
        match usize::try_from(rc) {
            Ok(sent) => return Ok(sent),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

/// Creates a header with one vector and no control data.
fn message_header(vector: *mut libc::iovec) -> libc::msghdr {
    // SAFETY: `msghdr` is plain data whose zero value means: no name, no vectors, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vector;
    message.msg_iovlen = 1;
    message
}

/// Writes one SCM_RIGHTS message; returns the length of the control data.
fn put_descriptors(control: &mut Control, fds: &[BorrowedFd<'_>]) -> usize {
    let data_bytes = size_of_val(fds) as u32;
    let header = control.0.as_mut_ptr().cast::<libc::cmsghdr>();
    // SAFETY: arithmetic on its argument.
    let header_bytes = unsafe { libc::CMSG_LEN(data_bytes) };
    // SAFETY: `cmsghdr` is plain data for which zero is valid. Musl's has padding that must be zero.
    let mut first: libc::cmsghdr = unsafe { std::mem::zeroed() };
    first.cmsg_len = header_bytes as _;
    first.cmsg_level = libc::SOL_SOCKET;
    first.cmsg_type = libc::SCM_RIGHTS;
    // SAFETY: the buffer is aligned for a `cmsghdr` and has room for it.
    unsafe { header.write(first) };
    // SAFETY: the header lies in our buffer; its data follows it there.
    let data = unsafe { libc::CMSG_DATA(header) }.cast::<RawFd>();
    for (index, fd) in fds.iter().enumerate() {
        // SAFETY: at most DESCRIPTORS_MAX (checked by the caller), for which CONTROL_BYTES has room.
        unsafe { data.wrapping_add(index).write_unaligned(fd.as_raw_fd()) };
    }
    // SAFETY: arithmetic on its argument.
    unsafe { libc::CMSG_SPACE(data_bytes) as usize }
}

/// Takes ownership of every descriptor in the control data of a received message.
fn take_descriptors(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut taken = Vec::new();
    // SAFETY: recvmsg left a valid control buffer and its length in the header (cmsg(3)).
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return headers that lie completely in the control buffer; it
        // is aligned.
        let found = unsafe { header.read() };
        if found.cmsg_level == libc::SOL_SOCKET && found.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: arithmetic.
            let header_bytes = unsafe { libc::CMSG_LEN(0) } as usize;
            let data_bytes = found.cmsg_len as usize - header_bytes;
            // SAFETY: the data follows the header in the buffer.
            let data = unsafe { libc::CMSG_DATA(header) }.cast::<RawFd>();
            for index in 0..data_bytes / size_of::<RawFd>() {
                // SAFETY: the kernel wrote that many descriptors behind the header.
                let fd = unsafe { data.wrapping_add(index).read_unaligned() };
                // SAFETY: the kernel installed the descriptor for us in this call; it has no other owner.
                taken.push(unsafe { OwnedFd::from_raw_fd(fd) });
            }
        }
        // SAFETY: as for CMSG_FIRSTHDR; null at the end.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_with_a_hidden_process_id_is_a_peer() {
        let hidden = libc::ucred { pid: 0, uid: 1000, gid: 100 };
        assert_eq!(peer_of(hidden), Some(PeerCredentials { pid: 0, uid: 1000, gid: 100 }));
    }

    #[test]
    fn an_invalid_user_id_means_no_peer() {
        assert_eq!(peer_of(libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX }), None);
    }
}
