//! Reasons why a device cannot be opened or formatted as part of a pool, each with its remedy.

/// Error of a device that cannot be used; the text states the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// The device was never formatted, or formatting was interrupted before any block could be stored.
    #[error("the device holds no pool: format it first")]
    NotFormatted,
    /// The device holds other data.
    #[error(
        "the device holds data that is not Reprise's (it begins with {beginning}): check the path; to use the device \
         nevertheless, erase its first 2 MiB and format it"
    )]
    Foreign {
        /// First eight bytes of the device, in printable form.
        beginning: String,
    },
    /// A newer version of Reprise formatted the device.
    #[error(
        "the pool has format version {found}, this agent supports up to {supported}: run a newer agent, or format \
        the device and lose its blocks"
    )]
    NewerVersion {
        /// Version on the device.
        found: u32,
        /// Latest version that this build understands.
        supported: u32,
    },
    /// An older version of Reprise formatted the device.
    #[error(
        "the pool has format version {found}, this agent supports only {supported}: run the agent that wrote it, or \
        erase the first 2 MiB of the device and lose its blocks"
    )]
    OlderVersion {
        /// Version on the device.
        found: u32,
        /// Version that this build understands.
        supported: u32,
    },
    /// Required metadata is not readable.
    #[error(
        "the pool's metadata is damaged beyond repair ({what}): its blocks are lost; check the device, then \
        format it"
    )]
    Corrupt {
        /// Damaged part, and the kind of damage.
        what: String,
    },
    /// The device is too small to be formatted.
    #[error("a device of {found} bytes is too small for a pool: at least {needed} bytes are needed")]
    TooSmall {
        /// Minimum size in bytes.
        needed: u64,
        /// Size of the device in bytes.
        found: u64,
    },
    /// The device is smaller than its pool.
    #[error(
        "the pool has {recorded} bytes but the device has {found}: restore its size (is it a truncated file or \
        partition?), or format it"
    )]
    WrongSize {
        /// Size of the pool in bytes.
        recorded: u64,
        /// Current size of the device in bytes.
        found: u64,
    },
    /// The configured size is smaller than the pool.
    #[error(
        "the pool has {recorded} bytes but {wanted} are configured: a pool grows but does not shrink; configure at least \
        {recorded} bytes, or remove the pool and lose its blocks"
    )]
    CannotShrink {
        /// Size of the pool in bytes.
        recorded: u64,
        /// Configured size in bytes.
        wanted: u64,
    },
    /// Invalid parameters for formatting.
    #[error("invalid pool parameters: {what}")]
    BadParams {
        /// Invalid parameter, and its limits.
        what: String,
    },
    /// The caller of [`Recovery::feed`](super::Recovery::feed) provided a wrong number of bytes.
    #[error(
        "recovery needs {expected} bytes and got {found}: read exactly the range that `next_read` returns"
    )]
    WrongRead {
        /// Number of bytes requested.
        expected: usize,
        /// Number of bytes provided.
        found: usize,
    },
    /// [`Recovery::finish`](super::Recovery::finish) was called before recovery was complete.
    #[error("recovery is not finished: feed it until `next_read` returns nothing")]
    Unfinished,
}
