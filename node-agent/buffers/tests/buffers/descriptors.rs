//! Descriptors over a unix socket: valid and invalid messages.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::Command;
use std::time::Duration;

use reprise_buffers::{BufferError, DESCRIPTORS_MAX, peer_credentials, recv_with_fds, send_with_fds};

fn pair() -> (UnixStream, UnixStream) {
    UnixStream::pair().expect("a socket pair")
}

#[test]
fn descriptors_arrive_with_the_first_byte_and_name_the_same_files() {
    let (here, there) = pair();
    let pipes: Vec<_> = (0..DESCRIPTORS_MAX).map(|_| io::pipe().expect("a pipe")).collect();
    let writers: Vec<BorrowedFd<'_>> = pipes.iter().map(|(_, writer)| writer.as_fd()).collect();
    send_with_fds(here.as_fd(), b"grants", &writers).expect("sent");

    let mut fds: Vec<OwnedFd> = Vec::new();
    let mut byte = [0; 1];
    assert_eq!(recv_with_fds(there.as_fd(), &mut byte, &mut fds).expect("received"), 1);
    assert_eq!((byte, fds.len()), (*b"g", DESCRIPTORS_MAX));
    let mut rest = [0; 16];
    assert_eq!(recv_with_fds(there.as_fd(), &mut rest, &mut fds).expect("received"), 5);
    assert_eq!((&rest[..5], fds.len()), (&b"rants"[..], DESCRIPTORS_MAX));

    for (index, (fd, (mut reader, writer))) in fds.into_iter().zip(pipes).enumerate() {
        // SAFETY: F_GETFD has no argument; the descriptor is open.
        let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
        assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC, "a child must not inherit it");
        drop(writer);
        io::PipeWriter::from(fd).write_all(&[index as u8]).expect("the pipe is open");
        let mut read = Vec::new();
        reader.read_to_end(&mut read).expect("the pipe ends");
        assert_eq!(read, [index as u8]);
    }
}

#[test]
fn a_message_larger_than_the_socket_buffer_arrives_whole() {
    let (here, there) = pair();
    let message: Vec<u8> = (0..1_500_000u32).map(|index| index as u8).collect();
    let expected = message.clone();
    let sender = std::thread::spawn(move || send_with_fds(here.as_fd(), &message, &[here.as_fd()]));
    let (mut received, mut fds, mut buffer) = (Vec::new(), Vec::new(), vec![0; 65_536]);
    while received.len() < expected.len() {
        let count = recv_with_fds(there.as_fd(), &mut buffer, &mut fds).expect("received");
        assert_ne!(count, 0, "the sender keeps its end open until all is sent");
        received.extend_from_slice(&buffer[..count]);
    }
    sender.join().expect("no panic").expect("sent");
    assert_eq!((received == expected, fds.len()), (true, 1));
}

#[test]
fn excess_descriptors_are_an_error_and_are_all_closed() {
    let (here, there) = pair();
    let (mut reader, writer) = io::pipe().expect("a pipe");
    send_raw(here.as_fd(), &[writer.as_raw_fd(); DESCRIPTORS_MAX + 8]);
    let mut fds = Vec::new();
    let refused = recv_with_fds(there.as_fd(), &mut [0; 8], &mut fds).expect_err("too many");
    assert!(matches!(refused, BufferError::Descriptors(_)), "{refused}");
    assert!(fds.is_empty());
    // The pipe ends only when every descriptor of its other end is closed.
    drop((writer, here, there));
    assert_eq!(reader.read_to_end(&mut Vec::new()).expect("the pipe ends"), 0);
}

#[test]
fn receives_descriptors_of_several_control_messages() {
    // The kernel merges nothing: two sends arrive as two messages, each with its own descriptors.
    let (here, there) = pair();
    for text in [b"a", b"b"] {
        send_with_fds(here.as_fd(), text, &[here.as_fd(), there.as_fd()]).expect("sent");
    }
    let mut fds = Vec::new();
    let mut received = 0;
    while received < 2 {
        received += recv_with_fds(there.as_fd(), &mut [0; 8], &mut fds).expect("received");
    }
    assert_eq!(fds.len(), 4);
}

#[test]
fn rejects_too_many_descriptors_or_no_bytes_before_sending() {
    let (here, _there) = pair();
    assert!(send_with_fds(here.as_fd(), b"x", &[here.as_fd(); DESCRIPTORS_MAX + 1]).is_err());
    assert!(send_with_fds(here.as_fd(), b"", &[here.as_fd()]).is_err());
}

#[test]
fn a_closed_socket_reads_as_end_of_stream_and_fails_to_send_without_a_signal() {
    let (here, there) = pair();
    drop(there);
    assert_eq!(recv_with_fds(here.as_fd(), &mut [0; 8], &mut Vec::new()).expect("the end"), 0);
    let refused = send_with_fds(here.as_fd(), b"x", &[]).expect_err("the other end is closed");
    assert_eq!(refused.io_kind(), Some(io::ErrorKind::BrokenPipe));
}

#[test]
fn a_receive_timeout_shows_as_would_block() {
    let (here, _there) = pair();
    here.set_read_timeout(Some(Duration::from_millis(1))).expect("a timeout");
    let error = recv_with_fds(here.as_fd(), &mut [0; 8], &mut Vec::new()).expect_err("nothing was sent");
    assert_eq!(error.io_kind(), Some(io::ErrorKind::WouldBlock));
}

#[test]
fn peer_credentials_are_those_of_the_other_end() {
    let (here, _there) = pair();
    let peer = peer_credentials(here.as_fd()).expect("connected");
    assert_eq!(peer.pid as u32, std::process::id());
    // SAFETY: getuid cannot fail and touches no memory.
    let uid = unsafe { libc::getuid() };
    // SAFETY: getgid cannot fail and touches no memory.
    let gid = unsafe { libc::getgid() };
    assert_eq!((peer.uid, peer.gid), (uid, gid));
    let alone = UnixDatagram::unbound().expect("a socket");
    assert!(peer_credentials(alone.as_fd()).is_err());
}

/// Set for the process that the next test starts in separate namespaces.
const IN_NAMESPACE: &str = "REPRISE_BUFFERS_TEST_IN_NAMESPACE";

#[test]
#[ignore = "needs user and PID namespaces and unshare(1): run with --ignored where a process may make them"]
fn a_peer_outside_our_pid_namespace_has_a_user_and_no_process_id() {
    if std::env::var_os(IN_NAMESPACE).is_some() {
        let peer = peer_credentials(io::stdin().as_fd()).expect("the other end is open");
        return assert_eq!((peer.pid, peer.uid), (0, 0), "the starter's user is root in the namespace");
    }
    let (_here, there) = pair();
    let this_test = std::env::current_exe().expect("a path");
    let status = Command::new("unshare")
        .args(["--user", "--map-root-user", "--pid", "--fork"])
        .arg(this_test)
        .args([
            "--exact",
            "descriptors::a_peer_outside_our_pid_namespace_has_a_user_and_no_process_id",
            "--ignored",
        ])
        .env(IN_NAMESPACE, "1")
        .stdin(OwnedFd::from(there))
        .status()
        .expect("unshare(1)");
    assert!(status.success(), "{status}");
}

/// Sends one byte with any number of descriptors, like a peer that ignores the limits.
fn send_raw(sock: BorrowedFd<'_>, fds: &[RawFd]) {
    let mut control = vec![0u64; 256];
    let mut byte = [1u8];
    let mut vector = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let data_bytes = size_of_val(fds) as u32;
    // SAFETY: zero is a valid value of this plain structure.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut vector;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    // SAFETY: arithmetic on its argument.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(data_bytes) } as usize;
    let header = control.as_mut_ptr().cast::<libc::cmsghdr>();
    // SAFETY: arithmetic on its argument.
    let cmsg_len = unsafe { libc::CMSG_LEN(data_bytes) } as usize;
    let filled = libc::cmsghdr { cmsg_len, cmsg_level: libc::SOL_SOCKET, cmsg_type: libc::SCM_RIGHTS };
    // SAFETY: 2 KiB of aligned control data have room for the header.
    unsafe { header.write(filled) };
    // SAFETY: the header lies in the buffer.
    let data = unsafe { libc::CMSG_DATA(header) };
    // SAFETY: 40 descriptors of 4 bytes fit behind the header.
    unsafe { std::ptr::copy_nonoverlapping(fds.as_ptr().cast::<u8>(), data, data_bytes as usize) };
    // SAFETY: the header names memory that lives through the call.
    let sent = unsafe { libc::sendmsg(sock.as_raw_fd(), &raw const message, 0) };
    assert_eq!(sent, 1, "{}", io::Error::last_os_error());
}
