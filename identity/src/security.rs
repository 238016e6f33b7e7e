//! The `[tls]` section of configuration files, and the only ways to accept and to dial connections.
//!
//! A process has one [`Security`]: certificates, or plain connections by an explicit setting. All listeners and all
//! clients use it, so a connection without certificates cannot be forgotten.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};

use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::{client, server};

use crate::credentials::{Credentials, CredentialsError};
use crate::limits::VerifiedIdentity;
use crate::name::Role;
use crate::tls::{Expected, Tls, TlsError};

/// Section `[tls]` of a configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TlsSettings {
    /// Folder with `ca.crt`, `tls.crt` and `tls.key` of the process.
    pub folder: PathBuf,
    /// Whether connections are plain: no encryption, and all callers may do all. On loopback addresses only.
    pub plain: bool,
}

/// Reason why the settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// None is set.
    #[error(
        "neither tls.folder nor tls.plain is set: set tls.folder to certificates of {0} (`reprise certs init` and `reprise \
         certs issue {0}` create them), or tls.plain = true if it serves loopback addresses only"
    )]
    Neither(Role),
    /// Both are set.
    #[error("tls.folder and tls.plain exclude each other: keep one")]
    Both,
    /// Plain connections would leave the machine.
    #[error(
        "tls.plain = true serves {0}, which is not a loopback address: use certificates (tls.folder; `reprise certs \
         issue` writes them), or 127.0.0.1"
    )]
    NotLoopback(SocketAddr),
    /// The certificate is of another process.
    #[error("tls.folder: the certificate is of {found}, and this process is {expected}: issue one for it")]
    Role {
        /// Role in the certificate.
        found: Role,
        /// Role of this process.
        expected: Role,
    },
    /// The files are unusable.
    #[error("tls.folder: {0}")]
    Credentials(#[from] CredentialsError),
}

/// How a process accepts and dials connections. Clones share the credentials.
#[derive(Clone, Debug)]
pub enum Security {
    /// Without encryption and identities.
    Plain,
    /// TLS 1.3 with certificates on both sides.
    Tls(Tls),
}

/// Accepted or dialled connection.
#[derive(Debug)]
pub enum Stream {
    /// Without encryption.
    Plain(TcpStream),
    /// Accepted with TLS.
    Accepted(Box<server::TlsStream<TcpStream>>),
    /// Dialled with TLS.
    Dialled(Box<client::TlsStream<TcpStream>>),
}

impl TlsSettings {
    /// Reads the credentials that the settings name, which must be of this role. `listeners` are the addresses that
    /// the process serves.
    ///
    /// # Errors
    /// No setting, plain connections on another address than loopback, unusable files, or those of another role.
    pub fn open(&self, role: &Role, listeners: &[SocketAddr]) -> Result<Security, SettingsError> {
        let has_folder = !self.folder.as_os_str().is_empty();
        match (has_folder, self.plain) {
            (true, true) => Err(SettingsError::Both),
            (true, false) => {
                let credentials = Credentials::read(&self.folder)?;
                credentials.check_issuer()?;
                let found = &credentials.identity.role;
                if found != role {
                    return Err(SettingsError::Role { found: found.clone(), expected: role.clone() });
                }
                tracing::info!(identity = %credentials.identity, "connections use TLS");
                Ok(Security::Tls(Tls::new(credentials)))
            }
            (false, true) => match listeners.iter().find(|one| !one.ip().to_canonical().is_loopback()) {
                Some(other) => Err(SettingsError::NotLoopback(*other)),
                None => {
                    tracing::warn!("connections are plain (tls.plain = true): all local callers may do all");
                    Ok(Security::Plain)
                }
            },
            (false, false) => Err(SettingsError::Neither(role.clone())),
        }
    }
}

impl Security {
    /// Uses the certificates in a folder, of any role: for programs that only dial.
    ///
    /// # Errors
    /// The files are unusable.
    pub fn read(folder: &Path) -> Result<Security, CredentialsError> {
        Ok(Security::Tls(Tls::new(Credentials::read(folder)?)))
    }

    /// Completes an accepted connection. Returns it with the identity of the client: none on plain connections, where
    /// all callers may do all.
    ///
    /// # Errors
    /// The client has no valid certificate of this cluster, or is too slow.
    pub async fn accept(&self, stream: TcpStream) -> Result<(Stream, Option<VerifiedIdentity>), TlsError> {
        match self {
            Security::Plain => Ok((Stream::Plain(stream), None)),
            Security::Tls(tls) => {
                let (stream, identity) = tls.accept(stream).await?;
                Ok((Stream::Accepted(Box::new(stream)), Some(identity)))
            }
        }
    }

    /// Connects to `host:port`, a server of the expected role.
    ///
    /// # Errors
    /// The server is unreachable, has another role, no valid certificate of this cluster, or is too slow.
    pub async fn dial(&self, address: &str, expected: Expected) -> Result<Stream, TlsError> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        match self {
            Security::Plain => Ok(Stream::Plain(stream)),
            Security::Tls(tls) => Ok(Stream::Dialled(Box::new(tls.connect(stream, expected).await?))),
        }
    }
}

impl Stream {
    /// Socket below the connection.
    pub fn socket(&self) -> &TcpStream {
        match self {
            Stream::Plain(stream) => stream,
            Stream::Accepted(stream) => stream.get_ref().0,
            Stream::Dialled(stream) => stream.get_ref().0,
        }
    }
}

/// Calls a method of the connection, whichever it is.
macro_rules! on_stream {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Stream::Plain($stream) => $call,
            Stream::Accepted($stream) => $call,
            Stream::Dialled($stream) => $call,
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        on_stream!(self, stream => Pin::new(stream).poll_read(context, buffer))
    }
}

/// Implements [`AsyncWrite`] for a connection whose field `stream` is a [`Stream`]: bytes pass unchanged.
#[macro_export]
macro_rules! write_to_stream {
    ($connection:ty) => {
        impl ::tokio::io::AsyncWrite for $connection {
            fn poll_write(
                mut self: ::std::pin::Pin<&mut Self>,
                context: &mut ::std::task::Context<'_>,
                bytes: &[u8],
            ) -> ::std::task::Poll<::std::io::Result<usize>> {
                ::tokio::io::AsyncWrite::poll_write(::std::pin::Pin::new(&mut self.stream), context, bytes)
            }

            fn poll_write_vectored(
                mut self: ::std::pin::Pin<&mut Self>,
                context: &mut ::std::task::Context<'_>,
                slices: &[::std::io::IoSlice<'_>],
            ) -> ::std::task::Poll<::std::io::Result<usize>> {
                ::tokio::io::AsyncWrite::poll_write_vectored(
                    ::std::pin::Pin::new(&mut self.stream),
                    context,
                    slices,
                )
            }

            fn is_write_vectored(&self) -> bool {
                ::tokio::io::AsyncWrite::is_write_vectored(&self.stream)
            }

            fn poll_flush(
                mut self: ::std::pin::Pin<&mut Self>,
                context: &mut ::std::task::Context<'_>,
            ) -> ::std::task::Poll<::std::io::Result<()>> {
                ::tokio::io::AsyncWrite::poll_flush(::std::pin::Pin::new(&mut self.stream), context)
            }

            fn poll_shutdown(
                mut self: ::std::pin::Pin<&mut Self>,
                context: &mut ::std::task::Context<'_>,
            ) -> ::std::task::Poll<::std::io::Result<()>> {
                ::tokio::io::AsyncWrite::poll_shutdown(::std::pin::Pin::new(&mut self.stream), context)
            }
        }
    };
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        on_stream!(self, stream => Pin::new(stream).poll_write(context, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        on_stream!(self, stream => Pin::new(stream).poll_write_vectored(context, slices))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Stream::Plain(stream) => stream.is_write_vectored(),
            Stream::Accepted(stream) => stream.is_write_vectored(),
            Stream::Dialled(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_stream!(self, stream => Pin::new(stream).poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_stream!(self, stream => Pin::new(stream).poll_shutdown(context))
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::authority::{Authority, CERTIFICATE_VALID};
    use crate::name::Identity;

    fn settings(folder: &TempDir, role: Role) -> TlsSettings {
        let authority = Authority::create("test").expect("a valid name");
        let identity = Identity::new("test", role).expect("a valid name");
        let issued = authority.issue(&identity, CERTIFICATE_VALID).expect("a valid period");
        issued.into_files(authority.certificate()).write(folder.path()).expect("the folder exists");
        TlsSettings { folder: folder.path().to_owned(), ..TlsSettings::default() }
    }

    fn addresses(addresses: &[&str]) -> Vec<SocketAddr> {
        addresses.iter().map(|one| one.parse().expect("an address")).collect()
    }

    #[test]
    fn plain_connections_are_for_loopback_only() {
        let plain = TlsSettings { plain: true, ..TlsSettings::default() };
        let loopback = addresses(&["127.0.0.1:7400", "[::1]:7410", "[::ffff:127.0.0.1]:1"]);
        assert!(matches!(plain.open(&Role::Member, &loopback), Ok(Security::Plain)));
        for other in ["0.0.0.0:7400", "10.0.0.1:7400", "[::]:7400"] {
            let listeners = [loopback.clone(), addresses(&[other])].concat();
            let error = plain.open(&Role::Member, &listeners).expect_err("another address").to_string();
            assert!(error.contains(other) && error.contains("tls.folder"), "{error}");
        }
    }

    #[test]
    fn refuses_to_choose_plain_connections_by_itself() {
        let role = Role::Agent("node-1".to_owned());
        let unset = TlsSettings::default();
        for listeners in [addresses(&["127.0.0.1:7410"]), addresses(&["0.0.0.0:7410"]), Vec::new()] {
            let error = unset.open(&role, &listeners).expect_err("no setting").to_string();
            assert!(
                ["tls.folder", "reprise certs issue agent/node-1", "tls.plain = true", "loopback"]
                    .iter()
                    .all(|words| error.contains(words)),
                "{error}"
            );
        }
    }

    #[test]
    fn refuses_two_answers_and_unusable_files() {
        let folder = TempDir::new().expect("a folder");
        let empty = TlsSettings { folder: folder.path().to_owned(), ..TlsSettings::default() };
        let both = TlsSettings { plain: true, ..empty.clone() };
        assert!(matches!(both.open(&Role::Member, &[]), Err(SettingsError::Both)));
        let error = empty.open(&Role::Member, &[]).expect_err("no files").to_string();
        assert!(error.contains("ca.crt"), "{error}");
    }

    #[test]
    fn refuses_the_certificate_of_another_process() {
        let folder = TempDir::new().expect("a folder");
        let settings = settings(&folder, Role::Agent("node-1".to_owned()));
        let error =
            settings.open(&Role::Agent("node-2".to_owned()), &[]).expect_err("another node").to_string();
        assert!(error.contains("agent/node-1") && error.contains("agent/node-2"), "{error}");
    }

    #[tokio::test]
    async fn accepts_and_dials_with_and_without_certificates() {
        let folder = TempDir::new().expect("a folder");
        let with = settings(&folder, Role::Member).open(&Role::Member, &[]).expect("valid files");
        for security in [Security::Plain, with] {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
            let address = listener.local_addr().expect("bound").to_string();
            let server = security.clone();
            let accepted = tokio::spawn(async move {
                let (stream, _) = listener.accept().await.expect("a connection");
                let (mut stream, identity) = server.accept(stream).await.expect("a valid client");
                stream.write_all(b"hello").await.expect("connected");
                stream.flush().await.expect("connected");
                (stream, identity)
            });
            let expected = Expected::Role(Role::Member);
            let mut stream = security.dial(&address, expected).await.expect("a valid server");
            let mut received = [0; 5];
            stream.read_exact(&mut received).await.expect("connected");
            let (server_side, identity) = accepted.await.expect("the task ends");
            assert_eq!(&received, b"hello");
            assert_eq!(
                identity.map(|one| one.identity.role),
                matches!(security, Security::Tls(_)).then_some(Role::Member)
            );
            assert_eq!(
                server_side.socket().peer_addr().expect("connected"),
                stream.socket().local_addr().expect("connected")
            );
        }
    }
}
