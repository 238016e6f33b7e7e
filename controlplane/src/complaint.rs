//! Saying that the store fails: once for each kind of failure until it is mended, and not with every attempt.

use std::mem::{Discriminant, discriminant};

use reprise_controlplane_store::StoreError;

/// What has been said of a failure that goes on.
#[derive(Debug, Default)]
pub struct Complaint {
    said: Option<Discriminant<StoreError>>,
}

impl Complaint {
    /// An attempt has failed: whether that is news.
    pub fn is_news(&mut self, error: &StoreError) -> bool {
        let kind = Some(discriminant(error));
        std::mem::replace(&mut self.said, kind) != kind
    }

    /// An attempt has succeeded: whatever fails from now on is news.
    pub fn mended(&mut self) {
        self.said = None;
    }
}

#[cfg(test)]
mod tests {
    use reprise_controlplane_store::Revision;

    use super::*;

    #[test]
    fn a_failure_is_news_once_of_its_kind_until_it_is_mended() {
        let away = |reason: &str| StoreError::Unavailable { reason: reason.to_owned() };
        let other = StoreError::Compacted { oldest: Revision(7) };
        let mut complaint = Complaint::default();
        assert!(complaint.is_news(&away("refused")));
        assert!(!complaint.is_news(&away("refused")) && !complaint.is_news(&away("timed out")));
        assert!(complaint.is_news(&other) && complaint.is_news(&away("refused")), "of another kind");
        complaint.mended();
        assert!(complaint.is_news(&away("refused")));
    }
}
