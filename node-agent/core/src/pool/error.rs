//! Why a device cannot be opened or formatted as part of a pool, and what to do about it.

/// A device that cannot be used. The texts say what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// Nothing was ever formatted here, or formatting was interrupted before anything could be stored.
    #[error("the device holds no pool: format it first")]
    NotFormatted,
    /// There is something else on the device.
    #[error(
        "the device holds data that is not Reprise's (it begins with {beginning}): check the path; to use the device \
         nevertheless, erase its first 2 MiB and format it"
    )]
    Foreign {
        /// The first eight bytes, for people.
        beginning: String,
    },
    /// A later Reprise wrote this.
    #[error(
        "the pool has format version {found}, this agent understands up to {supported}: run a newer agent, or format \
         the device and lose what it holds"
    )]
    NewerVersion {
        /// Version on the device.
        found: u32,
        /// Latest version that this build understands.
        supported: u32,
    },
    /// What must be readable is not.
    #[error(
        "the pool's metadata is damaged beyond repair ({what}): its blocks cannot be found any more; check the device, \
         then format it"
    )]
    Corrupt {
        /// Which part, and how.
        what: String,
    },
    /// Too small to be formatted.
    #[error("a device of {found} bytes is too small for a pool: {needed} bytes are needed at least")]
    TooSmall {
        /// Bytes needed.
        needed: u64,
        /// Bytes there.
        found: u64,
    },
    /// The device shrank.
    #[error(
        "the pool was formatted with {recorded} bytes but the device has {found}: restore its size (a truncated file \
         or partition, perhaps), or format it"
    )]
    WrongSize {
        /// Bytes when it was formatted.
        recorded: u64,
        /// Bytes now.
        found: u64,
    },
    /// Parameters that no pool can have.
    #[error("the pool cannot be formatted like this: {what}")]
    BadParams {
        /// Which parameter, and its limits.
        what: String,
    },
    /// The caller of [`Recovery::feed`](super::Recovery::feed) read less or more than was asked for.
    #[error("recovery asked for {expected} bytes and was fed {found}: read exactly what `next_read` says")]
    WrongRead {
        /// Bytes asked for.
        expected: usize,
        /// Bytes fed.
        found: usize,
    },
    /// [`Recovery::finish`](super::Recovery::finish) was called while `next_read` still wanted something.
    #[error("recovery is not finished: feed it until `next_read` returns nothing")]
    Unfinished,
}
