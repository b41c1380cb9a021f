"""CSV files: columns by name and type, names found or not, and faults with their lines."""

from __future__ import annotations

import numpy as np

from data.test_data import InFolder
from dlsys import data


class TestCsv(InFolder):
    def write(self, text: str) -> str:
        path = self.folder / "t.csv"
        path.write_text(text, encoding="utf-8")
        return str(path)

    def test_types_and_columns(self) -> None:
        path = self.write('rooms,price,city\n3,1.5,"Ulm, Ost"\n4,2e3,Jena\n')
        table = data.read_csv(path)
        self.assertEqual([a.dtype.kind for a in table.values()], ["i", "f", "U"])
        self.assertEqual(table["city"].tolist(), ["Ulm, Ost", "Jena"])
        self.assertEqual(list(data.read_csv(path, ["price", 0])), ["price", "rooms"])
        typed = data.read_csv(path, ["rooms"], types={"rooms": np.float32})
        self.assertEqual((typed["rooms"].dtype, typed["rooms"].tolist()), (np.float32, [3.0, 4.0]))

    def test_names_and_delimiters_are_found(self) -> None:
        self.assertEqual(list(data.read_csv(self.write("1;2\n3;4\n"))), ["0", "1"])
        self.assertEqual(list(data.read_csv(self.write("\ufeffa\tb\n\n3\t4\n"))), ["a", "b"])
        self.assertEqual(list(data.read_csv(self.write("x,2020\n3,4\n"))), ["x", "2020"])
        self.assertEqual(list(data.read_csv(self.write("7,x\n8,y\n"))), ["0", "1"])
        given = data.read_csv(self.write("a,b\nc,d\n"), header=False)
        self.assertEqual(given["0"].tolist(), ["a", "c"])

    def test_data_sets(self) -> None:
        path = self.write("a,b,kind,y\n1,2,cat,0.5\n3,4,ant,1.5\n5,6,cat,2.5\n")
        classes = data.csv_dataset(path, "kind", ["a", "b"])
        self.assertEqual((classes.classes, classes.labels.tolist()), (("ant", "cat"), [1, 0, 1]))
        np.testing.assert_array_equal(classes.images, np.float32([[1, 2], [3, 4], [5, 6]]))
        values = data.csv_dataset(path, "y", [0, 1])
        np.testing.assert_array_equal(values.labels, np.float32([[0.5], [1.5], [2.5]]))
        several = data.csv_dataset(path, ["a", "y"], ["b"])
        self.assertEqual(several.labels.shape, (3, 2))
        self.assertEqual(data.csv_dataset(path, "a", ["b"]).labels.tolist(), [1, 3, 5])
        self.fails("expected columns of numbers|texts in kind", data.csv_dataset, path, "y")

    def test_faults_have_lines_and_columns(self) -> None:
        for text, words in (
            ("a,b\n1,2\n3,\n", "t.csv, line 3|'b' is missing"),
            ("a,b\n1,2\nNaN,4\n", "t.csv, line 3|'a' is missing"),
            ("a,b\n1,2\n3\n", "line 3: the row has 1 fields, the first one 2"),
            ('a,b\n1,"2\n', "no CSV file"),
            ("a,a\n1,2\n", "two columns have one name"),
            ("a,b\n", "no row below"),
            ("", "no row"),
        ):
            with self.subTest(words):
                self.fails(words, data.read_csv, self.write(text))
        path = self.write("a,b\n1,2\nx,3\n")
        self.fails("line 3|'a' has 'x'|float32", data.read_csv, path, types={"a": np.float32})
        self.fails("no column 'c', it has a, b", data.read_csv, path, ["c"])
        self.fails("no column 2", data.read_csv, path, [2])
        self.fails("cannot be read", data.read_csv, self.folder / "none.csv")
        (self.folder / "b.csv").write_bytes(b"a,b\n\xff,1\n")
        self.fails("no CSV file in UTF-8", data.read_csv, self.folder / "b.csv")
