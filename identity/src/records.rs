//! Encrypted records of an established connection, each direction on its own.
//!
//! rustls does the handshake, derives the keys, and decrypts records. This module numbers records, changes keys, and
//! encrypts with the cipher that rustls uses. So one thread sends while another one receives, and bytes are encrypted
//! and decrypted in their place. A connection of rustls has both directions in one object, and copies received bytes
//! twice more. Its encryption of a single record allocates 16 KiB, which costs as much as the encryption.

#[cfg(test)]
mod fuzz;

use std::sync::{Arc, Mutex, PoisonError};

use ring::aead::{AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, UnboundKey};
use rustls::client::ClientConnectionData;
use rustls::crypto::cipher::{
    InboundOpaqueMessage, Iv, MessageDecrypter, Nonce, Tls13AeadAlgorithm, make_tls13_aad,
};
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use rustls::{
    AlertDescription, ConnectionTrafficSecrets, ContentType, Error, ExtractedSecrets, ProtocolVersion,
};

/// Bytes before the encrypted part of a record: type, version, length (RFC 8446, 5.2).
pub const RECORD_HEADER_BYTES: usize = 5;

/// Maximum number of bytes that a record carries.
pub const RECORD_PLAIN_BYTES_MAX: usize = 16 << 10;

/// Maximum size of a record with its header.
pub const RECORD_BYTES_MAX: usize = RECORD_HEADER_BYTES + RECORD_PLAIN_BYTES_MAX + 256;

/// Bytes behind the content of a record that this side sends: its kind and the tag.
const TRAILER_BYTES: usize = 1 + 16;

/// Maximum number of bytes that [`Sealer::seal`] writes: the announcement of a key, and a record.
pub const SEALED_BYTES_MAX: usize =
    2 * (RECORD_HEADER_BYTES + TRAILER_BYTES) + KEY_UPDATE.len() + RECORD_PLAIN_BYTES_MAX;

/// Number of records after which a sender changes its key: half of what AES-GCM allows (2²⁴), 128 GiB.
const RECORDS_PER_KEY: u64 = 1 << 23;

/// A change of the key after fewer records is early: our senders never do so.
const EARLY_RECORDS: u64 = RECORDS_PER_KEY / 8;

/// Maximum number of early changes on a connection. Each costs the receiver microseconds and the sender 27 bytes.
const EARLY_CHANGES_MAX: u32 = 16;

/// Handshake message that announces the next key of the sender, without a request for the receiver's.
const KEY_UPDATE: [u8; 5] = [24, 0, 0, 1, 0];

/// Violation of the record protocol: the connection must be closed.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The bytes are not an encrypted record.
    #[error("{0}")]
    Malformed(&'static str),
    /// A record does not match its tag, or cannot be encrypted.
    #[error("{0}")]
    Tls(#[from] Error),
    /// The other side refuses the connection.
    #[error("the other side refuses the connection: {0:?}")]
    Alert(AlertDescription),
}

/// Content of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opened {
    /// So many bytes behind the header of the record.
    Data(usize),
    /// The other side uses its next key from now on.
    NextKey,
    /// The other side sends nothing more.
    Closed,
}

/// Encrypts the bytes that this side sends.
pub struct Sealer {
    key: SealingKey,
    /// Number of the next record of the key.
    sequence: u64,
    records_per_key: u64,
    keys: Arc<Keys>,
}

/// Decrypts the records of the other side.
pub struct Opener {
    decrypter: Box<dyn MessageDecrypter>,
    /// Number of the next record of the key.
    sequence: u64,
    /// Whether the last record was a change of the key.
    is_after_change: bool,
    /// Number of early changes of the key.
    early_changes: u32,
    keys: Arc<Keys>,
}

struct SealingKey {
    key: LessSafeKey,
    iv: Iv,
}

/// Source of the next keys of both directions.
struct Keys {
    connection: Mutex<Schedule>,
    algorithm: &'static dyn Tls13AeadAlgorithm,
}

/// What rustls keeps of a connection after the handshake.
pub(crate) enum Schedule {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

/// Creates both directions of a connection after its handshake.
pub(crate) fn split(secrets: ExtractedSecrets, schedule: Schedule) -> Result<(Sealer, Opener), Error> {
    let suite = match &schedule {
        Schedule::Client(connection) => connection.negotiated_cipher_suite(),
        Schedule::Server(connection) => connection.negotiated_cipher_suite(),
    };
    let suite = suite.tls13().ok_or(Error::HandshakeNotComplete)?;
    let algorithm = suite.aead_alg;
    let ExtractedSecrets { tx: (sent, sending), rx: (received, receiving) } = secrets;
    let keys = Arc::new(Keys { connection: Mutex::new(schedule), algorithm });
    let opener = Opener {
        decrypter: decrypter(algorithm, receiving)?,
        sequence: received,
        is_after_change: false,
        early_changes: 0,
        keys: Arc::clone(&keys),
    };
    let key = SealingKey::new(sending)?;
    let sealer = Sealer { key, sequence: sent, records_per_key: RECORDS_PER_KEY, keys };
    Ok((sealer, opener))
}

impl SealingKey {
    fn new(secrets: ConnectionTrafficSecrets) -> Result<SealingKey, Error> {
        let (cipher, key, iv) = match secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return Err(Error::General("unknown cipher".to_owned())),
        };
        let key = UnboundKey::new(cipher, key.as_ref()).map_err(|_| Error::EncryptError)?;
        Ok(SealingKey { key: LessSafeKey::new(key), iv })
    }
}

fn decrypter(
    algorithm: &dyn Tls13AeadAlgorithm,
    secrets: ConnectionTrafficSecrets,
) -> Result<Box<dyn MessageDecrypter>, Error> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => Ok(algorithm.decrypter(key, iv)),
        _ => Err(Error::General("unknown cipher".to_owned())),
    }
}

impl Keys {
    fn next_sending(&self) -> Result<(u64, SealingKey), Error> {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let (sequence, secrets) = match &mut *connection {
            Schedule::Client(connection) => connection.update_tx_secret()?,
            Schedule::Server(connection) => connection.update_tx_secret()?,
        };
        Ok((sequence, SealingKey::new(secrets)?))
    }

    fn next_receiving(&self) -> Result<(u64, Box<dyn MessageDecrypter>), Error> {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let (sequence, secrets) = match &mut *connection {
            Schedule::Client(connection) => connection.update_rx_secret()?,
            Schedule::Server(connection) => connection.update_rx_secret()?,
        };
        Ok((sequence, decrypter(self.algorithm, secrets)?))
    }
}

impl Sealer {
    /// Changes the key after so many records. Tests of receivers need early changes.
    #[must_use]
    pub fn with_records_per_key(mut self, records: u64) -> Sealer {
        self.records_per_key = records;
        self
    }

    /// Writes a record, and before it the announcement of a new key when one is due. `fill` writes up to
    /// [`RECORD_PLAIN_BYTES_MAX`] bytes to the place where they are encrypted, and returns their number. Returns the
    /// number of bytes to send: none without content. `into` has at least [`SEALED_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// There is no next key, or the cipher fails.
    pub fn seal(
        &mut self,
        into: &mut [u8],
        fill: impl FnOnce(&mut [u8]) -> usize,
    ) -> Result<usize, RecordError> {
        let mut written = 0;
        if self.sequence >= self.records_per_key {
            into[RECORD_HEADER_BYTES..][..KEY_UPDATE.len()].copy_from_slice(&KEY_UPDATE);
            written = self.encrypt(ContentType::Handshake, into, KEY_UPDATE.len())?;
            (self.sequence, self.key) = self.keys.next_sending()?;
        }
        let into = &mut into[written..];
        let count = fill(&mut into[RECORD_HEADER_BYTES..][..RECORD_PLAIN_BYTES_MAX]);
        if count > 0 {
            written += self.encrypt(ContentType::ApplicationData, into, count)?;
        }
        Ok(written)
    }

    /// Encrypts the bytes behind the place of the header, and completes the record (RFC 8446, 5.2).
    fn encrypt(&mut self, kind: ContentType, into: &mut [u8], count: usize) -> Result<usize, RecordError> {
        let length = count + TRAILER_BYTES;
        let header = make_tls13_aad(length);
        let (head, rest) = into.split_at_mut(RECORD_HEADER_BYTES);
        head.copy_from_slice(&header);
        let (content, tag) = rest[..length].split_at_mut(count + 1);
        content[count] = u8::from(kind);
        // Each number is used once: `&mut self`, and it only grows until the key changes.
        let nonce = ring::aead::Nonce::assume_unique_for_key(Nonce::new(&self.key.iv, self.sequence).0);
        let sealed = self.key.key.seal_in_place_separate_tag(nonce, Aad::from(header), content);
        tag.copy_from_slice(sealed.map_err(|_| Error::EncryptError)?.as_ref());
        self.sequence += 1;
        Ok(RECORD_HEADER_BYTES + length)
    }
}

impl Opener {
    /// Size of the first record of received bytes; `None` before its header is complete.
    ///
    /// # Errors
    /// The bytes do not begin with an encrypted record of a permitted size.
    pub fn record_bytes(received: &[u8]) -> Result<Option<usize>, RecordError> {
        let Some([kind, major, minor, length @ ..]) = received.first_chunk::<RECORD_HEADER_BYTES>() else {
            return Ok(None);
        };
        if [*kind, *major, *minor] != [u8::from(ContentType::ApplicationData), 3, 3] {
            return Err(RecordError::Malformed("the bytes are not an encrypted record"));
        }
        let bytes = RECORD_HEADER_BYTES + usize::from(u16::from_be_bytes(*length));
        if bytes > RECORD_BYTES_MAX {
            return Err(RecordError::Malformed("the record is too long"));
        }
        Ok(Some(bytes))
    }

    /// Decrypts a whole record in its place.
    ///
    /// # Errors
    /// The record was changed on its way, or the other side violates the protocol or refuses the connection.
    pub fn open(&mut self, record: &mut [u8]) -> Result<Opened, RecordError> {
        let encrypted = record.get_mut(RECORD_HEADER_BYTES..).unwrap_or_default();
        let message =
            InboundOpaqueMessage::new(ContentType::ApplicationData, ProtocolVersion::TLSv1_2, encrypted);
        let plain = self.decrypter.decrypt(message, self.sequence)?;
        // 2⁶⁴ records take longer than any connection lives.
        self.sequence += 1;
        let is_after_change = std::mem::take(&mut self.is_after_change);
        match (plain.typ, plain.payload) {
            (ContentType::ApplicationData, []) => Err(RecordError::Malformed("an empty record")),
            (ContentType::ApplicationData, bytes) => Ok(Opened::Data(bytes.len())),
            (ContentType::Alert, [_, kind]) => match AlertDescription::from(*kind) {
                AlertDescription::CloseNotify => Ok(Opened::Closed),
                other => Err(RecordError::Alert(other)),
            },
            // One that sends only these would keep the reader busy without a byte for it.
            (ContentType::Handshake, bytes) if *bytes == KEY_UPDATE && is_after_change => {
                Err(RecordError::Malformed("a second change of the key without data"))
            }
            (ContentType::Handshake, bytes) if *bytes == KEY_UPDATE => {
                self.early_changes += u32::from(self.sequence < EARLY_RECORDS);
                if self.early_changes > EARLY_CHANGES_MAX {
                    return Err(RecordError::Malformed("too many changes of the key"));
                }
                self.is_after_change = true;
                (self.sequence, self.decrypter) = self.keys.next_receiving()?;
                Ok(Opened::NextKey)
            }
            _ => Err(RecordError::Malformed("an unexpected message after the handshake")),
        }
    }
}

impl std::fmt::Debug for Sealer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sealer").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Opener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opener").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}
