//! Certificates that an authority has issued: what the steps of a replacement check.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{fs, io};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::{FolderError, replace};
use crate::certificate::Fingerprint;
use crate::name::Identity;
use crate::write;

/// File of the list.
const LIST_FILE: &str = "issued.json";

/// Record of one issued certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IssuedRecord {
    /// Identity that the certificate states.
    #[serde(serialize_with = "text", deserialize_with = "parsed")]
    pub identity: Identity,
    /// Folder into which it was written.
    pub folder: PathBuf,
    /// Fingerprint of the certificate.
    pub fingerprint: Fingerprint,
    /// Fingerprint of the authority that has issued it.
    pub issuer: Fingerprint,
    /// Digest of the trusted authorities next to it.
    pub authorities: Fingerprint,
    /// End of its validity, in seconds since 1970.
    #[serde(serialize_with = "seconds", deserialize_with = "time")]
    pub not_after: SystemTime,
}

/// All certificates that have not ended.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct IssuedList(Vec<IssuedRecord>);

impl IssuedList {
    pub(super) fn read(folder: &Path) -> Result<IssuedList, FolderError> {
        let path = folder.join(LIST_FILE);
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| FolderError::List(path, error)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(IssuedList::default()),
            Err(error) => Err(FolderError::Io("read", path, error)),
        }
    }

    pub(super) fn write(&self, folder: &Path) -> Result<(), FolderError> {
        let bytes = serde_json::to_vec_pretty(self).expect("records are JSON");
        replace(folder, LIST_FILE, write::PUBLIC, &bytes)
    }

    pub(super) fn valid_at(&self, now: SystemTime) -> impl Iterator<Item = &IssuedRecord> {
        self.0.iter().filter(move |record| record.not_after > now)
    }

    /// Adds a record in the place of the one for the same folder, and of the certificate that it replaces.
    pub(super) fn replace(&mut self, former: Option<Fingerprint>, record: IssuedRecord, now: SystemTime) {
        self.0.retain(|other| {
            other.folder != record.folder && Some(other.fingerprint) != former && other.not_after > now
        });
        self.0.push(record);
    }
}

fn text<S: Serializer>(identity: &Identity, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(identity)
}

fn parsed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Identity, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
}

fn seconds<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs())
}

fn time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SystemTime, D::Error> {
    let seconds = u64::deserialize(deserializer)?;
    let time = UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
    time.ok_or_else(|| de::Error::custom(format!("invalid time {seconds}: expected seconds since 1970")))
}
