//! Header pages of extents on files, read by a separate thread.
//!
//! A read of a device that hangs in the kernel cannot be interrupted. The caller therefore waits until its deadline only.
//! Pages whose reads are late are given up: the thread owns the buffer, and the caller keeps their extents pinned until
//! [`HeaderReader::given_up`] returns 0. A dropped reader does not wait for the thread, which keeps the files open, so the
//! agent also sees the reads.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;

use reprise_buffers::PageBuffer;
use reprise_policy::layout::PAGE_BYTES;

/// A page: its file, if the device has one, and its offset.
pub(crate) type HeaderPage = (Option<Arc<File>>, u64);

/// The end of the read of a page: its index, and its bytes.
type ReadPage = (usize, Option<Vec<u8>>);

/// Pages that the thread reads for one call.
struct Job {
    pages: Vec<HeaderPage>,
    deadline: Instant,
    read: SyncSender<ReadPage>,
}

/// The thread; see the module.
#[derive(Debug)]
pub(crate) struct HeaderReader {
    jobs: SyncSender<Job>,
    /// Pages of all jobs that were not read yet.
    running: Arc<AtomicUsize>,
}

impl HeaderReader {
    pub(crate) fn start() -> io::Result<HeaderReader> {
        HeaderReader::start_with(|file, page, offset| file.read_exact_at(page, offset))
    }

    fn start_with(
        read: impl Fn(&File, &mut PageBuffer, u64) -> io::Result<()> + Send + 'static,
    ) -> io::Result<HeaderReader> {
        let page = PageBuffer::new(PAGE_BYTES as usize).map_err(io::Error::other)?;
        let (jobs, taken) = sync_channel(1);
        let running = Arc::new(AtomicUsize::new(0));
        let left = Arc::clone(&running);
        let thread = std::thread::Builder::new().name("headers".to_owned());
        thread.spawn(move || run(&taken, (page, read), &left))?;
        Ok(HeaderReader { jobs, running })
    }

    /// Returns the pages that were read by the deadline. While pages of an earlier call are given up, it reads none.
    pub(crate) fn read(&self, pages: Vec<HeaderPage>, deadline: Instant) -> Vec<Option<Vec<u8>>> {
        let mut headers = vec![None; pages.len()];
        if self.given_up() > 0 {
            return headers;
        }
        let (read, ended) = sync_channel(pages.len());
        self.running.store(pages.len(), Ordering::Release);
        if self.jobs.try_send(Job { pages, deadline, read }).is_err() {
            self.running.store(0, Ordering::Release);
            return headers;
        }
        let next = || ended.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        while let Ok((index, header)) = next() {
            headers[index] = header;
        }
        headers
    }

    /// Returns the number of pages whose reads have not ended.
    pub(crate) fn given_up(&self) -> usize {
        self.running.load(Ordering::Acquire)
    }
}

/// Reads pages until the reader is dropped; body of the thread.
fn run(
    jobs: &Receiver<Job>,
    (mut page, read): (PageBuffer, impl Fn(&File, &mut PageBuffer, u64) -> io::Result<()>),
    left: &AtomicUsize,
) {
    while let Ok(Job { pages, deadline, read: ended }) = jobs.recv() {
        for (index, (file, offset)) in pages.into_iter().enumerate() {
            let in_time = file.filter(|_| Instant::now() < deadline);
            let header = in_time.and_then(|file| read(&file, &mut page, offset).ok().map(|()| page.to_vec()));
            // Before the caller gets it: with the last page, nothing is given up.
            left.fetch_sub(1, Ordering::AcqRel);
            // A caller whose deadline has passed is gone.
            let _ = ended.send((index, header));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    const LONG: Duration = Duration::from_secs(10);

    fn page_of(byte: u8) -> Vec<u8> {
        vec![byte; PAGE_BYTES as usize]
    }

    fn file() -> Arc<File> {
        let file = tempfile::tempfile().expect("a file");
        for (number, byte) in [(0, 1), (1, 2)] {
            file.write_all_at(&page_of(byte), number * PAGE_BYTES).expect("written");
        }
        Arc::new(file)
    }

    #[test]
    fn pages_are_read_and_missing_ones_are_absent() {
        let file = file();
        let reader = HeaderReader::start().expect("a thread");
        let pages = vec![(Some(Arc::clone(&file)), PAGE_BYTES), (None, 0), (Some(file), 0), (None, 4)];
        let headers = reader.read(pages, Instant::now() + LONG);
        assert_eq!(headers, [Some(page_of(2)), None, Some(page_of(1)), None]);
        assert_eq!(reader.given_up(), 0);
    }

    #[test]
    fn a_device_that_hangs_costs_the_deadline_and_its_pages_stay_given_up_until_it_ends() {
        let (resume, hung) = channel::<()>();
        // The second page hangs.
        let reader = HeaderReader::start_with(move |file, page, offset| {
            if offset > 0 {
                let _ = hung.recv();
            }
            file.read_exact_at(page, offset)
        });
        let reader = reader.expect("a thread");
        let file = file();
        let pages = || [0, PAGE_BYTES, 0].map(|offset| (Some(Arc::clone(&file)), offset)).to_vec();
        let start = Instant::now();
        let headers = reader.read(pages(), start + Duration::from_millis(200));
        assert!(start.elapsed() < LONG);
        assert_eq!(headers, [Some(page_of(1)), None, None]);
        assert_eq!(reader.given_up(), 2, "their extents stay pinned");
        assert_eq!(
            reader.read(pages(), Instant::now() + LONG),
            vec![None; 3],
            "it waits for no second deadline"
        );
        resume.send(()).expect("the device hangs");
        while reader.given_up() > 0 {
            assert!(start.elapsed() < LONG, "the reads have not ended");
            std::thread::yield_now();
        }
        drop(resume);
        assert_eq!(reader.read(pages(), Instant::now() + LONG)[1], Some(page_of(2)));
    }

    #[test]
    fn a_dropped_reader_does_not_wait_for_a_device_that_hangs() {
        let (resume, hung) = channel::<()>();
        let reader = HeaderReader::start_with(move |_, _, _| {
            let _ = hung.recv();
            Ok(())
        });
        let reader = reader.expect("a thread");
        let headers = reader.read(vec![(Some(file()), 0)], Instant::now() + Duration::from_millis(50));
        assert_eq!(headers, [None]);
        let start = Instant::now();
        drop(reader);
        assert!(start.elapsed() < LONG);
        drop(resume);
    }
}
