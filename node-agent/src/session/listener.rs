//! The unix socket that engines connect to.
//!
//! The socket appears under its name only when it listens and has its mode bits: it is made under another name
//! beside it and renamed. A file that is there already is replaced only when it is a socket on which nobody
//! listens. Who may connect is decided by the file system and, again, by the user id that the kernel reports.
//!
//! The end does not depend on the name: somebody may have removed the file, or another agent may have put its own there.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind as IoKind};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use reprise_buffers::peer_credentials;
use reprise_daemon::rejected::{Listener, Reason};
use reprise_policy::connection_table::{Admission, ConnectionId, ConnectionTable};
use reprise_policy::{SessionId, TenantName};

use super::handshake::{Greeted, greet};
use super::{Peer, SessionContext, encode, outbound, read_requests};
use crate::config::SessionSettings;
use crate::core_loop::{Input, Opened};
use crate::error::{AgentError, ErrorKind};
use reprise_proto::local::FailureKind;

/// Pause after a failed accept: it fails for want of descriptors, which come back when sessions end.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A connection that is closed to make room ends within this time, or is not waited for.
const CLOSED_WITHIN: Duration = Duration::from_secs(1);

/// What the server is made of.
pub(crate) struct SessionServerSettings {
    pub(crate) session: SessionSettings,
    /// Sessions at a time, connections that have not greeted among them.
    pub(crate) sessions_max: usize,
    pub(crate) context: Arc<SessionContext>,
}

/// The listening socket and its thread.
pub(crate) struct SessionServer {
    path: PathBuf,
    file: FileId,
    /// The listening socket as a socket that can be shut down.
    listening: UnixStream,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

/// A listening socket and the file that it made.
#[derive(Debug)]
struct Bound {
    listener: UnixListener,
    file: FileId,
}

/// Which file it is, whatever its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileId {
    device: u64,
    inode: u64,
}

struct Shared {
    context: Arc<SessionContext>,
    allowed: Vec<u32>,
    stopping: AtomicBool,
    next_id: AtomicU64,
    sessions_max: usize,
    /// A connection that has not greeted can be closed by a copy of its socket; a session is busy.
    connections: Mutex<ConnectionTable<UnixStream>>,
    /// A connection has ended.
    ended: Condvar,
}

/// The place of a connection among those at a time; returned when dropped.
struct Place {
    shared: Arc<Shared>,
    id: ConnectionId,
}

impl SessionServer {
    /// Creates the socket and starts to accept.
    ///
    /// # Errors
    /// `ErrorKind::Resource`: the directory is missing or not writable, the name is taken by something else, or
    /// another agent listens.
    pub(crate) fn start(settings: SessionServerSettings) -> Result<SessionServer, AgentError> {
        let SessionServerSettings { session, sessions_max, context } = settings;
        let Bound { listener, file } = bind(&session)?;
        let listening = listener.try_clone().map(|listener| UnixStream::from(OwnedFd::from(listener)));
        let listening = listening.map_err(|error| {
            AgentError::new(ErrorKind::Resource, "cannot duplicate a descriptor").because(error)
        })?;
        let allowed = match session.allow_uids {
            Some(listed) => listed,
            None => vec![own_uid()?, 0],
        };
        let shared = Arc::new(Shared {
            context,
            allowed,
            stopping: AtomicBool::new(false),
            next_id: AtomicU64::new(1),
            sessions_max,
            connections: Mutex::new(ConnectionTable::new(sessions_max)),
            ended: Condvar::new(),
        });
        let accepting = spawn("sessions", {
            let shared = shared.clone();
            move || accept(&listener, &shared)
        })
        .map_err(|error| AgentError::new(ErrorKind::Resource, "cannot start a thread").because(error))?;
        Ok(SessionServer { path: session.socket, file, listening, shared, accepting: Some(accepting) })
    }

    /// Stops accepting; sessions that are open go on.
    pub(crate) fn stop_accepting(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        // On Linux this ends accept(2) with EINVAL and refuses who is still waiting; it fails for no listening socket.
        if let Err(error) = self.listening.shutdown(Shutdown::Both) {
            tracing::error!(%error, "cannot shut the session socket down");
        }
        if let Some(thread) = self.accepting.take() {
            let _ = thread.join();
        }
        self.file.remove(&self.path);
    }
}

impl FileId {
    fn of(path: &Path) -> io::Result<FileId> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(FileId { device: metadata.dev(), inode: metadata.ino() })
    }

    /// Removes the name if it is this file's.
    fn remove(self, path: &Path) {
        let removed = FileId::of(path).and_then(|found| {
            if found == self {
                return fs::remove_file(path);
            }
            tracing::info!(path = %path.display(), "the session socket's name belongs to another file: it stays");
            Ok(())
        });
        match removed {
            Err(error) if error.kind() == IoKind::NotFound => {
                tracing::info!(path = %path.display(), "the session socket was removed already");
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot remove the session socket");
            }
            Ok(()) => {}
        }
    }
}

/// Threads have names, so that `top -H` and a core dump can be read.
fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body)
}

fn accept(listener: &UnixListener, shared: &Arc<Shared>) {
    for connection in listener.incoming() {
        if shared.stopping.load(Ordering::Acquire) {
            return;
        }
        match connection {
            Ok(socket) => {
                admit(shared, socket);
                shared.wait_for_closing();
            }
            Err(error) => {
                shared.context.count_rejected(Reason::System);
                tracing::warn!(listener = Listener::Sessions.as_str(), %error, "cannot accept a connection");
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

/// Checks the user and that there is room, then serves the session on threads of its own.
fn admit(shared: &Arc<Shared>, socket: UnixStream) {
    let peer = match peer_credentials(socket.as_fd()) {
        Ok(credentials) => Peer {
            client_name: String::new(),
            tenant: TenantName::default_tenant(),
            pid: credentials.pid,
            uid: credentials.uid,
        },
        Err(error) => {
            shared.context.count_rejected(Reason::System);
            tracing::warn!(%error, "session refused: cannot read the credentials of the client");
            return;
        }
    };
    if !shared.allowed.contains(&peer.uid) {
        let message = format!("user {} may not use this agent; add it to session.allow_uids", peer.uid);
        refuse(shared, &socket, &peer, (Reason::Refused, FailureKind::BadRequest, &message));
        return;
    }
    let place = match shared.place(&socket) {
        Ok(Some(place)) => place,
        Ok(None) => {
            let message = format!("{} sessions are open already", shared.sessions_max);
            refuse(shared, &socket, &peer, (Reason::Full, FailureKind::Busy, &message));
            return;
        }
        Err(error) => {
            let message = format!("the agent has no file descriptor left: {error}");
            refuse(shared, &socket, &peer, (Reason::System, FailureKind::Busy, &message));
            return;
        }
    };
    let id = SessionId(shared.next_id.fetch_add(1, Ordering::Relaxed));
    let started = spawn(&format!("session-{id}-in"), move || serve(&place, socket, id, peer));
    if let Err(error) = started {
        shared.context.count_rejected(Reason::System);
        tracing::warn!(%error, "session refused: cannot start a thread");
    }
}

impl Shared {
    /// A place for a connection, that of the oldest connection without a greeting if there is no other; `None` when all
    /// are sessions. Sessions are idle for as long as their engine is.
    fn place(self: &Arc<Shared>, socket: &UnixStream) -> io::Result<Option<Place>> {
        let admission = self.connections().admit(socket.try_clone()?);
        let id = match admission {
            Admission::Admitted(id) => id,
            Admission::Replaced { id, closed } => {
                self.context.count_rejected(Reason::Idle);
                // Its thread reads the end of the stream. It fails when the client has closed it, which is as well.
                let _ = closed.shutdown(Shutdown::Both);
                id
            }
            Admission::Full(_) => return Ok(None),
        };
        Ok(Some(Place { shared: Arc::clone(self), id }))
    }

    /// Waits until connections that were closed to make room have ended: their threads free their descriptors.
    fn wait_for_closing(&self) {
        let waits = |table: &mut ConnectionTable<UnixStream>| table.must_wait();
        // Without the time limit a thread that hangs would keep all engines out.
        drop(self.ended.wait_timeout_while(self.connections(), CLOSED_WITHIN, waits));
    }

    /// Each change is whole, so a poisoned lock is as good as any.
    fn connections(&self) -> MutexGuard<'_, ConnectionTable<UnixStream>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Keeps the place until the session ends; false when it was given to another connection.
    fn keep(&self) -> bool {
        self.shared.connections().set_busy(self.id)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.connections().remove(self.id);
        self.shared.ended.notify_one();
    }
}

/// Answers a connection that becomes no session.
fn refuse(
    shared: &Shared,
    socket: &UnixStream,
    peer: &Peer,
    (reason, kind, message): (Reason, FailureKind, &str),
) {
    shared.context.count_rejected(reason);
    let Peer { pid, uid, .. } = peer;
    tracing::warn!(kind = reason.as_str(), pid, uid, why = message, "session refused");
    // The accepting thread must not wait for a client: a new socket's buffer takes a failure at once.
    let _ = socket.set_nonblocking(true);
    let _ = outbound::send_frame(socket, encode::failure(0, kind, message));
}

/// One session from its greeting to its end.
fn serve(place: &Place, socket: UnixStream, id: SessionId, peer: Peer) {
    let context = &place.shared.context;
    let _session = tracing::info_span!("session", id = id.0, pid = peer.pid, uid = peer.uid).entered();
    let Some(greeted) = greet(context, socket, id, peer) else { return };
    let Greeted { opened, session, progress, mut frames, welcome } = greeted;
    if !place.keep() {
        // Closed to make room while its greeting was checked.
        return;
    }
    let Peer { client_name, tenant, .. } = session.peer();
    tracing::info!(client = %client_name, %tenant, "session opened");
    let writer = spawn(&format!("session-{id}-out"), {
        let session = session.clone();
        move || session.outbound.write_queued()
    });
    let writer = match writer {
        Ok(writer) => writer,
        Err(error) => {
            context.count_rejected(Reason::System);
            tracing::warn!(%error, "session refused: cannot start a thread");
            return;
        }
    };
    let opened = Opened { opened, session: session.clone(), progress };
    if context.inbox.send(Input::Opened(Box::new(opened))).is_ok() {
        session.outbound.send(outbound::Outgoing::Frame(welcome));
        read_requests(context, &session, &mut frames);
    }
    // A client that closes its sending side has ended the session; one that was told why must still get the words.
    if !session.outbound.is_closing() {
        session.close();
    }
    let _ = writer.join();
    tracing::info!("session closed");
}

/// The user that this process runs as: `/proc/self` belongs to it.
fn own_uid() -> Result<u32, AgentError> {
    fs::metadata("/proc/self").map(|metadata| metadata.uid()).map_err(|error| {
        AgentError::new(ErrorKind::Resource, "cannot read /proc/self; list session.allow_uids instead")
            .because(error)
    })
}

/// A socket that listens, under its final name and mode.
fn bind(settings: &SessionSettings) -> Result<Bound, AgentError> {
    let path = &settings.socket;
    let refuse = |what: String| {
        AgentError::new(ErrorKind::Resource, format!("session.socket '{}': {what}", path.display()))
    };
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match fs::metadata(directory) {
        Ok(metadata) if metadata.is_dir() => {}
        Ok(_) => return Err(refuse(format!("'{}' is not a directory", directory.display()))),
        Err(error) => {
            let what = format!(
                "directory '{}' cannot be used; create it, writable by the agent's user",
                directory.display()
            );
            return Err(refuse(what).because(error));
        }
    }
    make_way(path).map_err(refuse)?;
    let mut fresh = path.clone().into_os_string();
    fresh.push(".new");
    publish(Path::new(&fresh), path, settings.mode).map_err(|error| {
        let what = match error.kind() {
            IoKind::PermissionDenied | IoKind::ReadOnlyFilesystem => {
                format!(
                    "cannot create a socket in '{}'; it must be writable by the agent's user",
                    directory.display()
                )
            }
            _ => "cannot listen".to_owned(),
        };
        refuse(what).because(error)
    })
}

fn publish(fresh: &Path, path: &Path, mode: u32) -> io::Result<Bound> {
    match fs::remove_file(fresh) {
        Err(error) if error.kind() != IoKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(fresh)?;
    let published = fs::set_permissions(fresh, Permissions::from_mode(mode)).and_then(|()| {
        let file = FileId::of(fresh)?;
        fs::rename(fresh, path)?;
        Ok(file)
    });
    match published {
        Ok(file) => Ok(Bound { listener, file }),
        Err(error) => {
            let _ = fs::remove_file(fresh);
            Err(error)
        }
    }
}

/// Whatever has the name already may be replaced, or it is an error to say so.
fn make_way(path: &Path) -> Result<(), String> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == IoKind::NotFound => return Ok(()),
        Err(error) => return Err(format!("cannot be examined: {error}")),
    };
    if !metadata.file_type().is_socket() {
        return Err("something that is no socket has this name; move it away or choose another".to_owned());
    }
    match UnixStream::connect(path) {
        Ok(_) => Err("another process listens there; stop it or choose another name".to_owned()),
        Err(error) if error.kind() == IoKind::ConnectionRefused => {
            tracing::info!(path = %path.display(), "replacing the socket of an agent that is gone");
            Ok(())
        }
        Err(error) => Err(format!("somebody may listen there, but it cannot be found out: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use reprise_buffers::{Arena, ArenaConfig, HugePolicy};
    use reprise_daemon::rejected::RejectedConnections;

    use super::*;
    use crate::core_loop::Inbox;
    use crate::session::SESSIONS_MAX;

    fn settings(directory: &Path) -> SessionSettings {
        SessionSettings { socket: directory.join("agent.sock"), mode: 0o640, allow_uids: None }
    }

    #[test]
    fn the_socket_has_its_mode_bits_and_a_stale_one_is_replaced() {
        let directory = tempfile::tempdir().expect("a directory");
        let settings = settings(directory.path());
        drop(bind(&settings).expect("first"));
        let second = bind(&settings).expect("the first is gone, its file is stale");
        let mode = fs::metadata(&settings.socket).expect("exists").permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        let error = bind(&settings).expect_err("the second listens").chain();
        assert!(error.contains("another process listens"), "{error}");
        drop(second);
    }

    fn server(directory: &Path) -> SessionServer {
        let config = ArenaConfig { bytes: 2 << 20, region_bytes: 2 << 20, huge: HugePolicy::Never };
        let context = SessionContext {
            inbox: Inbox::new().0,
            arena: Arc::new(Arena::new(&config).expect("2 MiB are to be had")),
            node: "test".to_owned(),
            identity: None,
            tenants: Arc::default(),
            draining: AtomicBool::new(false),
            rejected: RejectedConnections::default(),
        };
        let settings = SessionServerSettings {
            session: settings(directory),
            sessions_max: SESSIONS_MAX,
            context: Arc::new(context),
        };
        SessionServer::start(settings).expect("it listens")
    }

    /// Stops a server; panics when it does not end.
    fn stop(mut server: SessionServer) {
        let (done, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            server.stop_accepting();
            done.send(()).expect("the test waits");
        });
        ended.recv_timeout(Duration::from_secs(10)).expect("it ends promptly");
    }

    #[test]
    fn a_server_ends_without_its_file_and_removes_no_other() {
        let directory = tempfile::tempdir().expect("a directory");
        let socket = settings(directory.path()).socket;
        stop(server(directory.path()));
        assert!(!socket.exists());
        let first = server(directory.path());
        fs::remove_file(&socket).expect("it is there");
        let second = server(directory.path());
        stop(first);
        assert!(UnixStream::connect(&socket).is_ok(), "the second one listens");
        fs::remove_file(&socket).expect("the second one's is there");
        stop(second);
    }

    #[test]
    fn a_file_in_the_way_and_a_missing_directory_are_named() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut settings = settings(directory.path());
        fs::write(&settings.socket, b"precious").expect("written");
        assert!(bind(&settings).expect_err("in the way").chain().contains("no socket"));
        assert_eq!(fs::read(&settings.socket).expect("still there"), b"precious");
        settings.socket = directory.path().join("missing/agent.sock");
        assert!(bind(&settings).expect_err("missing").chain().contains("create it"));
    }
}
