//! Limits that all listeners share: which client a connection counts against, and how long a connection may stay.
//!
//! A certificate is verified when a connection opens, so no connection stays for long after its certificate has ended,
//! and none stays for more than a day. A client that renews its certificate in time is always asked to connect again
//! before that: a connection is at most a quarter of the validity old, and a renewal leaves a third of it.

use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use crate::certificate::CertificateFacts;
use crate::credentials::Credentials;
use crate::name::Identity;

/// Age at which a connection is replaced.
pub const CONNECTION_AGE_MAX: Duration = Duration::from_secs(24 * 3_600);

/// Time for running requests to end on a connection that is too old.
pub const CONNECTION_GRACE: Duration = Duration::from_secs(60);

/// Difference of two clocks that is tolerated: an end by another clock may be so much later.
pub const CLOCK_SKEW: Duration = Duration::from_secs(3_600);

/// Share of a certificate's validity that a connection may last.
const AGES_PER_VALIDITY: u32 = 4;

/// Smallest share of one client: enough for a person and a scraper.
const SHARE_MIN: usize = 4;

/// Client that connections are counted against.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Client {
    /// A client that has not shown an identity.
    Address(IpAddr),
    /// A client with a certificate.
    Identity(Identity),
}

/// Period in which a certificate is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// Begin of the period.
    pub not_before: SystemTime,
    /// End of the period.
    pub not_after: SystemTime,
}

/// Identity in a verified certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedIdentity {
    /// The identity.
    pub identity: Identity,
    /// Validity of the certificate.
    pub validity: Validity,
}

/// Returns the number of connections that one client may have, of all connections of a listener: a quarter.
pub fn share_of(connections_max: usize) -> usize {
    (connections_max / 4).max(SHARE_MIN).min(connections_max)
}

impl Client {
    /// Client at an address; an IPv4 address in IPv6 form counts as the IPv4 address.
    pub fn at(address: IpAddr) -> Client {
        Client::Address(address.to_canonical())
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Client::Address(address) => address.fmt(f),
            Client::Identity(identity) => identity.fmt(f),
        }
    }
}

impl Validity {
    /// Time from now on after which a connection is closed: its certificate has ended by all clocks that differ at most by
    /// [`CLOCK_SKEW`].
    pub fn closed_after(&self) -> Duration {
        self.ends_within(SystemTime::now())
    }

    /// Time from now on after which a new connection is replaced.
    pub fn replaced_after(&self) -> Duration {
        self.connection_age_max(SystemTime::now())
    }

    fn ends_within(&self, now: SystemTime) -> Duration {
        (self.not_after + CLOCK_SKEW).duration_since(now).unwrap_or_default()
    }

    /// Age at which connections with certificates of this length are replaced: a day, or less for a short validity.
    pub fn replaced_within(&self) -> Duration {
        let whole = self.not_after.duration_since(self.not_before).unwrap_or_default();
        CONNECTION_AGE_MAX.min(whole / AGES_PER_VALIDITY)
    }

    /// Age at which a connection is replaced that opens now: as [`replaced_within`](Self::replaced_within), and never
    /// after the end.
    fn connection_age_max(&self, now: SystemTime) -> Duration {
        self.replaced_within().min(self.ends_within(now))
    }
}

impl From<&CertificateFacts> for Validity {
    fn from(facts: &CertificateFacts) -> Validity {
        Validity { not_before: facts.not_before, not_after: facts.not_after }
    }
}

impl From<&Credentials> for Validity {
    fn from(credentials: &Credentials) -> Validity {
        Validity { not_before: credentials.not_before, not_after: credentials.not_after }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3_600);
    const DAY: Duration = Duration::from_secs(86_400);

    fn valid_for(length: Duration) -> Validity {
        let not_before = SystemTime::UNIX_EPOCH + 20_000 * DAY;
        Validity { not_before, not_after: not_before + length }
    }

    #[test]
    fn connections_end_after_a_day_and_at_the_end_of_their_certificate() {
        let long = valid_for(90 * DAY);
        assert_eq!(long.connection_age_max(long.not_before), DAY);
        assert_eq!(long.connection_age_max(long.not_after - HOUR), 2 * HOUR, "with the tolerated difference");
        assert_eq!(long.connection_age_max(long.not_after + 2 * HOUR), Duration::ZERO);
        assert_eq!(long.ends_within(long.not_after), CLOCK_SKEW);
    }

    #[test]
    fn connections_of_renewed_clients_end_before_the_former_certificate() {
        for length in [HOUR, 12 * HOUR, DAY, 3 * DAY, 90 * DAY] {
            let certificate = valid_for(length);
            // The last moment at which a client opens a connection with it.
            let renewed = certificate.not_after - length / 3;
            let end = renewed + certificate.connection_age_max(renewed);
            assert!(end < certificate.not_after, "{length:?}");
        }
    }

    #[test]
    fn one_client_has_a_quarter_and_never_more_than_all() {
        assert_eq!([1, 3, 8, 16, 64].map(share_of), [1, 3, 4, 4, 16]);
    }

    #[test]
    fn addresses_in_both_forms_are_one_client() {
        let parse = |text: &str| Client::at(text.parse().expect("an address"));
        assert_eq!(parse("::ffff:10.0.0.1"), parse("10.0.0.1"));
        assert_eq!(parse("10.0.0.1").to_string(), "10.0.0.1");
    }
}
